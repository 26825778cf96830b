"""Loops of a compiled program that count as one pass, for their trip count is not known."""

import jax

from praxis_tools.explain.hlo_runs import executed, trip_count
from praxis_tools.explain.hlo_text import op_name_of, parse


def unknown_loops(compiled: jax.stages.Compiled | str) -> list[str]:
    """Returns the op names of the loops whose trip count the program does not tell."""
    program = parse(compiled)
    loops = [site for site in executed(program) if site.instruction.opcode == "while"]
    unknown = [s for s in loops if trip_count(program, s.computation, s.instruction) is None]
    return [op_name_of(site.instruction) or site.instruction.name for site in unknown]
