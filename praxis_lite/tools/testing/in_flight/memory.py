"""Whether the devices have memory for a step that is made again."""

import math

from praxis_lite.core.errors import OutOfMemory, format_bytes
from praxis_lite.host.host_memory import check_program_fits
from praxis_lite.tools.testing.in_flight.again import Placement
from praxis_lite.tools.testing.in_flight.placements import bytes_of_weights

_ADVICE = "Without run.certify_every_steps nothing is made again."


def check_room(place: Placement) -> None:
    """Raises OutOfMemory if the devices of this process cannot hold a certificate's arrays.

    Beside the state of training these are the weights once more, as they lie on another mesh, and
    the gradients. To be called between steps, when nothing else is on the devices.
    """
    compiled, devices = place.compile(), place.mesh.local_devices
    program = f"A certificate on the mesh {place.name}"
    check_program_fits(compiled, devices, program, _ADVICE)
    stats = compiled.memory_analysis()
    if stats is None:
        return
    copies = 0 if place.is_own else bytes_of_weights(place.partitioner.layout)
    needed = stats.temp_size_in_bytes + stats.output_size_in_bytes + copies
    for device in devices:
        memory = device.memory_stats() or {}
        left = memory.get("bytes_limit", math.inf) - memory.get("bytes_in_use", 0)
        if needed > left:
            raise OutOfMemory(
                f"{program} takes {format_bytes(needed)} on each device beside the state of "
                f"training, and {format_bytes(int(left))} are free on {device}. {_ADVICE}"
            )
