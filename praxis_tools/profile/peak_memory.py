"""Breaks down the peak memory of a device during a step by array and by layer."""

import collections
import dataclasses
from collections.abc import Mapping
from pathlib import Path

from praxis_lite.trainer.hooks.profile_facts import HLO_PROTO, read_facts
from praxis_tools.explain.hlo_layers import layer_of
from praxis_tools.explain.hlo_text import parse
from praxis_tools.profile.buffers import largest_temporaries
from praxis_tools.profile.measured import OUTSIDE, text_of_step


@dataclasses.dataclass(frozen=True)
class PeakMemory:
    """The memory of a device during a step, in bytes, according to the compiler.

    Attributes:
      peak: Arguments + outputs - outputs in donated arguments + temporaries.
      arrays: Maps the path of each array in the state to its size.
      batch: Size of all other arguments.
      outputs: Size of the outputs that are not stored in donated arguments.
      temporaries: Size of all temporaries.
      layers: Maps each layer to the total size of its buffers, for the largest temporary buffers.
      used: Maximum memory used on any device of the first process since the process started,
        including state initialization and evaluations; None if the platform does not report it.
    """

    peak: int
    arrays: Mapping[str, int]
    batch: int
    outputs: int
    temporaries: int
    layers: Mapping[str, int]
    used: int | None


def peak_memory(folder: Path) -> PeakMemory:
    """Reads the memory of a profiled step from the files of the profile.

    Raises:
      ConfigError: A file is missing or damaged.
    """
    facts = read_facts(folder)
    arrays = _by_size(facts.arrays)
    used = max(facts.peak_bytes.values(), default=None)
    planned = facts.step_bytes
    outputs = planned["output"] - planned["alias"]
    return PeakMemory(
        peak=planned["argument"] + outputs + planned["temp"],
        arrays=arrays,
        batch=max(0, planned["argument"] - sum(arrays.values())),
        outputs=outputs,
        temporaries=planned["temp"],
        layers=_temporaries_by_layer(folder),
        used=used,
    )


def _temporaries_by_layer(folder: Path) -> dict[str, int]:
    program = parse(text_of_step(folder))
    computations = {
        name: computation for computation in program.computations.values() for name in computation
    }
    sizes: collections.Counter[str] = collections.Counter()
    for name, size in largest_temporaries(folder / HLO_PROTO):
        layer = ""
        if (computation := computations.get(name)) is not None:
            layer = layer_of(program, computation[name], computation)
        sizes[layer or OUTSIDE] += size
    return _by_size(sizes)


def _by_size(sizes: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(sizes.items(), key=lambda item: (-item[1], item[0])))
