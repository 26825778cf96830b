"""Checks that a state and a step fit into memory, and the errors when they do not."""

import contextlib
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from praxis_lite.core.errors import ConfigError, OutOfMemory, format_bytes
from praxis_lite.core.partitioner.compiled_steps import Step
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.core.partitioner.train_state import LeafLayout, StateLayout
from praxis_lite.core.xla_workarounds.mended_products import mended
from praxis_lite.host import host_memory
from praxis_lite.host.lack_of_memory import lack_of_memory
from praxis_lite.inputs.base import InputPipeline
from praxis_lite.trainer.layout_table import shape_text

_NUM_NAMED = 3
_SMALLER_STATE = (
    "Split it over more devices (mesh.ici_mesh_shape, with a sharding preset such as fsdp, or "
    "Learner.slot_mesh_axes for slots alone), keep slots on the host (Learner.host_slots), take an "
    "optimizer with smaller slots (adafactor, lion, low_precision_slots in "
    "bfloat16), or make the model smaller"
)
_SMALLER_STEP = (
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
            f"{_largest(leaves)} {_SMALLER_STATE}; of simulated devices each has a copy of what is "
            "not split, so take fewer of them, or devices that exist."
        )
    else:
        leaves = [leaf for leaf in leaves if not leaf.is_on_host]
        each, available = sum(leaf.bytes_per_device for leaf in leaves), bytes_of_a_device(devices)
        if each <= available:
            return
        message = (
            f"{what} does not fit: each device of the mesh holds {format_bytes(each)} of it, and "
            f"has {format_bytes(int(available))} of memory. {_largest(leaves)} {_SMALLER_STATE}."
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


def compile_step(
    step: Step, pipeline: InputPipeline, name: str, num_processes: int = 1
) -> jax.stages.Compiled:
    """Compiles a step for the batches of a dataset, before it runs: the first call finds it.

    Products that XLA may permute are fixed, with a note. For batches of the same shapes it returns
    the same program, without checking memory again.

    Args:
      name: of the dataset, "datasets.train".
      num_processes: how many of this host are about to run it.

    Raises:
      OutOfMemory: the devices are simulated, and this host cannot hold what the step makes.
    """
    spec = pipeline.element_spec()
    leaves, structure = jax.tree.flatten(spec)
    key = structure, *((x.shape, jnp.dtype(x.dtype)) for x in leaves)
    programs = _compiled.setdefault(step, {})
    if key in programs:
        return programs[key]
    compiled = mended(step.lower(spec), step.where.mesh).compile()
    devices = step.where.mesh.local_devices
    advice = f"Make {name}.batch_size, or its rows, smaller" + (
        f"; {_SMALLER_STEP}" if step.trains else ", or take fprop_dtype=bfloat16"
    )
    if len(devices) > 1:
        advice += "; take fewer simulated devices, for each has a copy of what is not split"
    host_memory.check_program_fits(
        compiled, devices, f"{step.title} on {name}",
        f"{advice}; or hosts that have more memory.", num_processes,
    )
    programs[key] = compiled
    return compiled


_compiled: "weakref.WeakKeyDictionary[Step, dict[Any, jax.stages.Compiled]]" = (
    weakref.WeakKeyDictionary()
)


def compile_init(partitioner: Partitioner, key: jax.Array) -> None:
    """Compiles the init of a new state; as `compile_step`, in its errors too."""
    lowered = partitioner.init.trace(key).lower()
    host_memory.check_program_fits(
        mended(lowered, partitioner.mesh).compile(), partitioner.mesh.local_devices,
        "Making a new state", f"{_SMALLER_STATE}.",
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
            f"{_largest(layout.leaves())} For smaller activations lower batch_size, {_SMALLER_STEP}"
            f". {_SMALLER_STATE}."
        ) from error


def _largest(leaves: Iterable[LeafLayout]) -> str:
    largest = sorted(leaves, key=lambda leaf: -leaf.bytes_per_device)[:_NUM_NAMED]
    named = [
        f"{leaf.path} {shape_text(leaf.shape)} {leaf.dtype}, {format_bytes(leaf.bytes_per_device)}"
        for leaf in largest
    ]
    return f"The largest arrays on each device: {'; '.join(named)}."
