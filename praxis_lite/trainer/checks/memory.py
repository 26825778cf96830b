"""Checks that the state and a batch fit into memory, and explains out-of-memory errors."""

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax
from jax.sharding import Mesh

from praxis_lite.core.errors import Error, OutOfMemory, format_bytes
from praxis_lite.core.partitioner.train_state import LeafLayout, StateLayout
from praxis_lite.host import host_memory
from praxis_lite.host.lack_of_memory import lack_of_memory
from praxis_lite.trainer.layout_table import shape_text

__all__ = ("bytes_of_a_device", "check_fits")

_NUM_LARGEST = 3
SMALLER_STATE = (
    "Split it over more devices (mesh.ici_mesh_shape with a sharding preset such as fsdp, or "
    "Learner.slot_mesh_axes for only the slots), store slots on the host (Learner.host_slots), use "
    "an optimizer with smaller slots (adafactor, lion, low_precision_slots in "
    "bfloat16), or use a smaller model"
)
SMALLER_STEP = (
    "set Learner.gradient_accumulation_steps, fprop_dtype=bfloat16 or a checkpoint_policy of the "
    "stack"
)


def check_fits(layout: StateLayout, mesh: Mesh, mode: str) -> None:
    """Checks that this process's devices can hold the state, before it is created.

    A state that passes this check may still be too large, because gradients, activations and copies
    need additional memory.

    Args:
      layout: Layout of the TrainState.
      mesh: The mesh.
      mode: "train" to check the complete state, "eval" or "decode" to check only the weights.

    Raises:
      OutOfMemory: The state does not fit in memory.
    """
    is_training, devices = mode == "train", mesh.local_devices
    leaves = [leaf for leaf in layout.leaves() if is_training or leaf.path.startswith("mdl_vars/")]
    per_device = sum(leaf.bytes_per_device for leaf in leaves)
    subject = "The training state" if is_training else "The model"
    if devices[0].platform == "cpu":
        # A training step allocates a separate buffer for each simulated device. Restored weights
        # share a single buffer among the devices.
        needed = (
            per_device * len(devices)
            if is_training
            else sum(math.prod(leaf.padded_shape) * leaf.dtype.itemsize for leaf in leaves)
        )
        available = host_memory.available_bytes()
        if needed <= available:
            return
        message = (
            f"{subject} takes {format_bytes(needed)} of this machine's memory on {len(devices)} "
            f"simulated device{'s' * (len(devices) > 1)}, but {format_bytes(int(available))} are "
            f"available. {_largest(leaves)} {SMALLER_STATE}; or use fewer simulated devices, "
            "because each device holds a copy of replicated arrays, or use real devices."
        )
    else:
        leaves = [leaf for leaf in leaves if not leaf.is_on_host]
        per_device = sum(leaf.bytes_per_device for leaf in leaves)
        available = bytes_of_a_device(devices)
        if per_device <= available:
            return
        message = (
            f"{subject} does not fit: it needs {format_bytes(per_device)} on each device of the "
            f"mesh, but a device has {format_bytes(int(available))} of memory. "
            f"{_largest(leaves)} {SMALLER_STATE}."
        )
    raise OutOfMemory(f"{message} `praxis explain` shows the layout without allocating it.")


def bytes_of_a_device(devices: Sequence[jax.Device]) -> float:
    """Returns the bytes of memory per device. Simulated devices share the host's free memory."""
    local = [device for device in devices if device.process_index == jax.process_index()]
    if local[0].platform == "cpu":
        return host_memory.available_bytes() / len(local)
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in local]
    return min((limit for limit in limits if limit), default=math.inf)


def check_batch_fits(spec: Mapping[str, jax.ShapeDtypeStruct], fraction: float, name: str) -> None:
    """Checks that this host's part of a batch fits in its memory, before the batch is created.

    Args:
      spec: Shapes and dtypes of the global batch.
      fraction: Fraction of the rows that this process holds.
      name: The dataset's name, such as "datasets.train".

    Raises:
      OutOfMemory: The rows need more memory than is available.
    """
    leaves = jax.tree.leaves(dict(spec))
    size = fraction * sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    available = host_memory.available_bytes()
    if size > available:
        shapes = ", ".join(f"{key} {shape_text(leaf.shape)}" for key, leaf in spec.items())
        raise OutOfMemory(
            f"A batch of {name} takes {format_bytes(int(size))} on this host ({shapes}), but "
            f"{format_bytes(int(available))} are available. Lower {name}.batch_size, or use "
            "smaller examples. Learner.gradient_accumulation_steps does not make the batch smaller."
        )


@contextlib.contextmanager
def explaining_out_of_memory(layout: StateLayout) -> Iterator[None]:
    """Converts out-of-memory errors from the compiler, a device or the host to OutOfMemory.

    The message contains the failed allocation and the largest arrays in the state.
    """
    try:
        yield
    except Error:
        raise
    except Exception as error:
        reason = lack_of_memory(error)
        if reason is None:
            raise
        per_device = sum(leaf.bytes_per_device for leaf in layout.leaves())
        raise OutOfMemory(
            f"The job ran out of memory: {reason}. Each device holds {format_bytes(per_device)} of "
            "the training state, in addition to gradients, activations and the batch. "
            f"{_largest(layout.leaves())} To reduce activations, lower batch_size, {SMALLER_STEP}. "
            f"To reduce the state: {SMALLER_STATE[0].lower()}{SMALLER_STATE[1:]}."
        ) from error


def _largest(leaves: Iterable[LeafLayout]) -> str:
    largest = sorted(leaves, key=lambda leaf: -leaf.bytes_per_device)[:_NUM_LARGEST]
    lines = [
        f"{leaf.path} {shape_text(leaf.shape)} {leaf.dtype}, {format_bytes(leaf.bytes_per_device)}"
        for leaf in largest
    ]
    return f"The largest arrays on each device: {'; '.join(lines)}."
