"""The memory of a device at the peak of a step, by array: the state's, and the temporaries."""

import collections
import dataclasses
from collections.abc import Mapping
from pathlib import Path

from praxis_lite.run.trainer.hooks.profile_facts import HLO_PROTO, ProfileFacts, read_facts
from praxis_lite.tools.explain.hlo_layers import layers_of, together
from praxis_lite.tools.explain.hlo_runs import Site
from praxis_lite.tools.explain.hlo_text import parse
from praxis_lite.tools.profile.buffers import largest_temporaries
from praxis_lite.tools.profile.measured import OUTSIDE, text_of_step


@dataclasses.dataclass(frozen=True)
class PeakMemory:
    """Bytes of a device in a step, as the compiler plans them.

    Attributes:
      peak: arguments + outputs - outputs in donated arguments + temporaries; None where the
        compiler does not tell.
      arrays: of the state, by path.
      batch: of the other arguments.
      outputs: that lie in no donated argument.
      temporaries: all of them; `layers` has the largest buffers among them, by layer.
      used: the most that was in use on a device of the first process since it began, with the
        state's initialisation and all evaluations; None where the platform does not tell.
    """

    peak: int | None
    arrays: Mapping[str, int]
    batch: int
    outputs: int
    temporaries: int
    layers: Mapping[str, int]
    used: int | None


def peak_memory(folder: Path) -> PeakMemory:
    """Returns the memory of a profiled step, from the profile's files.

    Raises:
      ConfigError: a file is missing or damaged.
    """
    facts = read_facts(folder)
    arrays = _by_size(facts.arrays)
    used = max(facts.peak_bytes.values(), default=None)
    planned = facts.step_bytes
    if planned is None:
        return PeakMemory(None, arrays, 0, 0, 0, {}, used)
    outputs = planned["output"] - planned["alias"]
    return PeakMemory(
        planned["argument"] + outputs + planned["temp"], arrays,
        max(0, planned["argument"] - sum(arrays.values())), outputs, planned["temp"],
        _layers(folder, facts), used,
    )


def _layers(folder: Path, facts: ProfileFacts) -> dict[str, int]:
    program = parse(text_of_step(folder))
    sites = {
        name: Site(instruction, computation, 1, False, False, (), False)
        for computation in program.computations.values()
        for name, instruction in computation.items()
    }
    sizes: collections.Counter[str] = collections.Counter()
    for name, size in largest_temporaries(folder / HLO_PROTO):
        layers = layers_of(program, sites[name]) if name in sites else {}
        sizes[together(layers) or OUTSIDE] += size
    return _by_size(sizes)


def _by_size(sizes: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(sizes.items(), key=lambda item: (-item[1], item[0])))
