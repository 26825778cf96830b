"""Checks that a state and a step fit into memory, and the errors when they do not."""

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax
from jax.sharding import Mesh

from praxis_lite.core.errors import ConfigError, OutOfMemory, format_bytes
from praxis_lite.core.partitioner.train_state import LeafLayout, StateLayout
from praxis_lite.host import host_memory
from praxis_lite.host.lack_of_memory import lack_of_memory
from praxis_lite.trainer.layout_table import shape_text

__all__ = ("bytes_of_a_device", "check_fits")

_NUM_NAMED = 3
SMALLER_STATE = (
    "Split it over more devices (mesh.ici_mesh_shape, with a sharding preset such as fsdp, or "
    "Learner.slot_mesh_axes for slots alone), keep slots on the host (Learner.host_slots), take an "
    "optimizer with smaller slots (adafactor, lion, low_precision_slots in "
    "bfloat16), or make the model smaller"
)
SMALLER_STEP = (
    "set Learner.gradient_accumulation_steps, fprop_dtype=bfloat16 or a checkpoint_policy of the "
    "stack"
)


def check_fits(layout: StateLayout, mesh: Mesh, mode: str) -> None:
    """Raises ConfigError if the devices of this process cannot hold the state, before it is made.

    A state that is refused cannot fit. One that is accepted may still be too large, because
    gradients, activations and copies come on top. The mode "train" needs all of the state, "eval"
    and "decode" only the weights.
    """
    is_training, devices = mode == "train", mesh.local_devices
    leaves = [leaf for leaf in layout.leaves() if is_training or leaf.path.startswith("mdl_vars/")]
    each = sum(leaf.bytes_per_device for leaf in leaves)
    what = "The state of training" if is_training else "What is evaluated or decoded with"
    if devices[0].platform == "cpu":
        # A step makes a buffer for each device; arrays that were read may share one.
        needed = each * len(devices) if is_training else sum(
            math.prod(leaf.padded_shape) * leaf.dtype.itemsize for leaf in leaves
        )
        available = host_memory.available_bytes()
        if needed <= available:
            return
        message = (
            f"{what} takes {format_bytes(needed)} on {len(devices)} simulated devices, which share "
            f"this machine's memory, and {format_bytes(int(available))} are available here. "
            f"{_largest(leaves)} {SMALLER_STATE}; of simulated devices each has a copy of what is "
            "not split, so take fewer of them, or devices that exist."
        )
    else:
        leaves = [leaf for leaf in leaves if not leaf.is_on_host]
        each, available = sum(leaf.bytes_per_device for leaf in leaves), bytes_of_a_device(devices)
        if each <= available:
            return
        message = (
            f"{what} does not fit: each device of the mesh holds {format_bytes(each)} of it, and "
            f"has {format_bytes(int(available))} of memory. {_largest(leaves)} {SMALLER_STATE}."
        )
    raise ConfigError(f"{message} --mode=explain needs no memory for it.")


def bytes_of_a_device(devices: Sequence[jax.Device]) -> float:
    """Returns the bytes of memory per device; simulated devices share those left on their host."""
    local = [device for device in devices if device.process_index == jax.process_index()]
    if local[0].platform == "cpu":
        return host_memory.available_bytes() / len(local)
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in local]
    return min((limit for limit in limits if limit), default=math.inf)


def check_batch_fits(
    spec: Mapping[str, jax.ShapeDtypeStruct], share: float, name: str
) -> None:
    """Checks that the host can hold its rows of a batch, before any is made.

    Args:
      spec: of the whole batch.
      share: of the rows that this process has.
      name: of the dataset, "datasets.train".

    Raises:
      ConfigError: it cannot.
    """
    leaves = jax.tree.leaves(dict(spec))
    size = share * sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    available = host_memory.available_bytes()
    if size > available:
        shapes = ", ".join(f"{key} {shape_text(leaf.shape)}" for key, leaf in spec.items())
        raise ConfigError(
            f"A batch of {name} takes {format_bytes(int(size))} on this host ({shapes}), and "
            f"{format_bytes(int(available))} are available here. Make {name}.batch_size, or its "
            "rows, smaller; Learner.gradient_accumulation_steps does not make the batch smaller."
        )


@contextlib.contextmanager
def saying_what_is_large(layout: StateLayout) -> Iterator[None]:
    """Turns an out-of-memory error of the compiler, a device or the host into an OutOfMemory.

    It names what was allocated, and the largest arrays of the state.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        lacking = lack_of_memory(error)
        if lacking is None:
            raise
        each = sum(leaf.bytes_per_device for leaf in layout.leaves())
        raise OutOfMemory(
            f"The job ran out of memory: {lacking}. Each device holds {format_bytes(each)} of the "
            "state of training; gradients, activations and the batch come on top. "
            f"{_largest(layout.leaves())} For smaller activations lower batch_size, {SMALLER_STEP}"
            f". {SMALLER_STATE}."
        ) from error


def _largest(leaves: Iterable[LeafLayout]) -> str:
    largest = sorted(leaves, key=lambda leaf: -leaf.bytes_per_device)[:_NUM_NAMED]
    named = [
        f"{leaf.path} {shape_text(leaf.shape)} {leaf.dtype}, {format_bytes(leaf.bytes_per_device)}"
        for leaf in largest
    ]
    return f"The largest arrays on each device: {'; '.join(named)}."
