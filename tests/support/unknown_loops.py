"""Finds loops that a cost analysis counts once, because their trip count is unknown."""

import jax

from praxis_tools.explain.hlo_runs import executed, trip_count
from praxis_tools.explain.hlo_text import op_name_of, parse


def unknown_loops(compiled: jax.stages.Compiled | str) -> list[str]:
    """Returns the op names of loops in a compiled step whose trip count is unknown."""
    program = parse(compiled)
    loops = [site for site in executed(program) if site.instruction.opcode == "while"]
    unknown = [s for s in loops if trip_count(program, s.computation, s.instruction) is None]
    return [op_name_of(site.instruction) or site.instruction.name for site in unknown]
