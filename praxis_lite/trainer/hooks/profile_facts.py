"""Writes files that supplement a profile's trace: the HLO, the mesh and memory use."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from praxis_lite.core.errors import ConfigError
from praxis_lite.host.atomic_files import write_atomically
from praxis_lite.host.file_reading import read_json
from praxis_lite.inputs.base import TRAIN
from praxis_lite.trainer.job_on_mesh import JobOnMesh

__all__ = ("HLO_PROTO", "HLO_TXT", "ProfileFacts", "read_facts")

# Files in the same folder as profile.json. Instructions have the same names in the HLO text as in
# the trace.
HLO_TXT = "train_step.hlo.txt"
HLO_PROTO = "train_step.hlo_proto.pb"  # The HLO with its buffer assignment, for xprof.
MEMORY_PROF = "memory.prof"  # Live arrays by the line of code that created them, for pprof.
_MEMORY_KINDS = ("argument", "output", "temp", "alias", "generated_code")


@dataclasses.dataclass(frozen=True)
class DeviceFacts:
    """A device in the mesh, with the same fields as `jax.Device`."""

    id: int
    platform: str
    device_kind: str
    process_index: int
    slice_index: int | None
    coords: tuple[int, ...] | None


@dataclasses.dataclass(frozen=True)
class ProfileFacts:
    """The content of `profile.json`.

    Attributes:
      first_step: First traced step.
      last_step: Last traced step.
      seconds: Duration of the trace, measured by the first process.
      axis_sizes: Sizes of the mesh axes.
      devices: Devices in the mesh, in mesh order.
      arrays: Bytes per device for each array in the state, keyed by path.
      step_bytes: Bytes per device in the compiler's memory plan for a step: "argument", "output",
        "temp", "alias" and "generated_code".
      peak_bytes: Peak bytes in use since the process started, keyed by device id, for the devices
        of the first process. Empty on platforms that do not report peak memory.
    """

    first_step: int
    last_step: int
    seconds: float
    axis_sizes: Mapping[str, int]
    devices: Sequence[DeviceFacts]
    arrays: Mapping[str, int]
    step_bytes: Mapping[str, int]
    peak_bytes: Mapping[int, int]

    @property
    def num_steps(self) -> int:
        return self.last_step - self.first_step + 1


def write_facts(job: JobOnMesh, folder: Path, steps: range, seconds: float) -> None:
    """Writes the files that supplement a profile's trace, with `profile.json` last.

    Args:
      job: The job, placed on its mesh.
      folder: The profile's folder.
      steps: The traced steps.
      seconds: Duration of the trace.

    Raises:
      ConfigError: A file cannot be written.
      jax.errors.JaxRuntimeError: XLA cannot serialize the executable.
    """
    partitioner = job.partitioner
    # This hits JAX's cache, because the loop has already compiled this step.
    compiled = partitioner.train_step.lower(job.datasets[TRAIN].element_spec()).compile()
    stats, mesh = compiled.memory_analysis(), partitioner.mesh
    write_atomically(folder / MEMORY_PROF, jax.profiler.device_memory_profile())
    write_atomically(folder / HLO_TXT, (compiled.as_text() or "").encode())
    write_atomically(folder / HLO_PROTO, _hlo_proto(compiled, stats))
    facts = ProfileFacts(
        first_step=steps[0],
        last_step=steps[-1],
        seconds=seconds,
        axis_sizes=dict(mesh.shape),
        devices=[_facts_of(device) for device in mesh.devices.flat],
        arrays={leaf.path: leaf.bytes_per_device for leaf in partitioner.layout.leaves()},
        step_bytes={name: getattr(stats, f"{name}_size_in_bytes") for name in _MEMORY_KINDS},
        peak_bytes={
            device.id: peak
            for device in mesh.local_devices
            if (peak := (device.memory_stats() or {}).get("peak_bytes_in_use")) is not None
        },
    )
    text = json.dumps(dataclasses.asdict(facts), indent=1)
    write_atomically(folder / "profile.json", text.encode())


def read_facts(folder: Path) -> ProfileFacts:
    """Returns the facts about a profile; raises ConfigError if they are missing or damaged."""
    path = folder / "profile.json"
    fields = read_json(path)
    try:
        devices = [
            DeviceFacts(**{**entry, "coords": entry["coords"] and tuple(map(int, entry["coords"]))})
            for entry in fields["devices"]
        ]
        peaks = {int(key): int(value) for key, value in fields["peak_bytes"].items()}
        return ProfileFacts(**{**fields, "devices": devices, "peak_bytes": peaks})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} is damaged or was not written by praxis_lite ({type(error).__name__}: "
            f"{error}). Record a new profile."
        ) from None


def _facts_of(device: jax.Device) -> DeviceFacts:
    coords = getattr(device, "coords", None)
    return DeviceFacts(
        device.id,
        device.platform,
        device.device_kind,
        device.process_index,
        getattr(device, "slice_index", None),
        coords and tuple(coords),
    )


def _hlo_proto(compiled: jax.stages.Compiled, stats: Any) -> bytes:
    """Serializes an HloProto: field 1 is the module, field 3 the buffer assignment."""
    executable = compiled.runtime_executable()
    assert executable is not None, "It was compiled here."
    module = executable.hlo_modules()[0].as_serialized_hlo_module_proto()
    buffers = getattr(stats, "serialized_buffer_assignment_proto", b"")
    return b"".join(
        bytes([number << 3 | 2]) + _varint(len(part)) + part
        for number, part in ((1, module), (3, buffers))
        if part
    )


def _varint(number: int) -> bytes:
    """Encodes an integer as a protocol buffer varint."""
    groups = []
    while True:
        groups.append(number & 0x7F | (0x80 if number > 0x7F else 0))
        number >>= 7
        if not number:
            return bytes(groups)
