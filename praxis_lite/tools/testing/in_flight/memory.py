"""Whether the devices have memory for what a certificate computes."""

import math
from collections.abc import Sequence

import jax

from praxis_lite.core.errors import OutOfMemory, format_bytes
from praxis_lite.host.host_memory import check_program_fits

_ADVICE = "Without run.certify_every_steps nothing is recomputed."


def check_room(
    compiled: jax.stages.Compiled, devices: Sequence[jax.Device], program: str, copies: int = 0
) -> None:
    """Raises OutOfMemory if devices of this process cannot hold a certificate's arrays.

    Beside the state of training these are what the program computes, and `copies`. To be called
    between steps, when nothing else is on the devices.

    Args:
      program: as the subject of a sentence.
      copies: bytes on each device of arrays that are made for it.
    """
    check_program_fits(compiled, devices, program, _ADVICE)
    stats = compiled.memory_analysis()
    if stats is None:
        return
    needed = stats.temp_size_in_bytes + stats.output_size_in_bytes + copies
    for device in devices:
        memory = device.memory_stats() or {}
        left = memory.get("bytes_limit", math.inf) - memory.get("bytes_in_use", 0)
        if needed > left:
            raise OutOfMemory(
                f"{program} takes {format_bytes(needed)} on each device beside the state of "
                f"training, and {format_bytes(int(left))} are free on {device}. {_ADVICE}"
            )
