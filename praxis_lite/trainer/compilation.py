"""Steps compiled before they run, once per shape of a batch; and JAX's compilation cache."""

import weakref
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.core.partitioner.compiled_steps import Step
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.core.xla_workarounds.mended_products import mended
from praxis_lite.host import host_memory
from praxis_lite.host.whole_files import user_cache
from praxis_lite.inputs.base import InputPipeline
from praxis_lite.job import processes
from praxis_lite.trainer.checks.memory import SMALLER_STATE, SMALLER_STEP

__all__ = ("compile_step", "use_compilation_cache")

_compiled: "weakref.WeakKeyDictionary[Step, dict[Any, jax.stages.Compiled]]" = (
    weakref.WeakKeyDictionary()
)


def use_compilation_cache() -> None:
    """Lets JAX keep compiled programs, so that the second launch of a job starts at once."""
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(user_cache() / "xla"))


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
        f"; {SMALLER_STEP}" if step.trains else ", or take fprop_dtype=bfloat16"
    )
    if len(devices) > 1:
        advice += "; take fewer simulated devices, for each has a copy of what is not split"
    host_memory.check_program_fits(
        compiled, devices, f"{step.title} on {name}",
        f"{advice}; or hosts that have more memory.", num_processes,
    )
    programs[key] = compiled
    return compiled


def compile_init(partitioner: Partitioner, key: jax.Array) -> None:
    """Compiles the init of a new state; as `compile_step`, in its errors too."""
    lowered = partitioner.init.trace(key).lower()
    host_memory.check_program_fits(
        mended(lowered, partitioner.mesh).compile(), partitioner.mesh.local_devices,
        "Making a new state", f"{SMALLER_STATE}.",
    )


def compile_together(steps: Iterable[tuple[Step, InputPipeline, str]]) -> None:
    """Lets several processes compile, each at its pace, before they meet in a step.

    Gloo, between processes on CPU, waits no longer than 30 s for the others in its first
    collective.

    Args:
      steps: each with a dataset and its name, "datasets.train".

    Raises:
      OutOfMemory: as `compile_step`, of all processes of this host together.
    """
    if processes.count() > 1:
        for step, pipeline, name in steps:
            compile_step(step, pipeline, name, processes.count_on_this_host())
        processes.exchange("the steps are compiled", "", 3600)
