"""Compiles steps ahead of time, once per batch shape, and sets up JAX's compilation cache."""

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.core.partitioner.compiled_steps import Step
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.core.xla_workarounds.patched_matmuls import patch_matmuls
from praxis_lite.host import host_memory
from praxis_lite.host.atomic_files import user_cache
from praxis_lite.inputs.base import InputPipeline
from praxis_lite.job import processes
from praxis_lite.trainer.checks.memory import SMALLER_STATE, SMALLER_STEP

__all__ = ("compile_step", "current_metadata", "use_compilation_cache")

_compiled: "weakref.WeakKeyDictionary[Step, dict[Any, jax.stages.Compiled]]" = (
    weakref.WeakKeyDictionary()
)


def use_compilation_cache() -> None:
    """Enables JAX's persistent compilation cache, unless the user has set a cache directory."""
    # JAX adds its settings to the class at run time.
    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", str(user_cache() / "xla"))


@contextlib.contextmanager
def current_metadata() -> Iterator[None]:
    """Ensures that programs compiled in this context contain the current names and source lines.

    By default, the key of JAX's persistent cache does not depend on the layer names and the source
    lines in a program, so a cached program may contain names and lines from an older version of the
    code.
    """
    name = "jax_compilation_cache_include_metadata_in_key"
    previous = getattr(jax.config, name)
    jax.config.update(name, True)
    try:
        yield
    finally:
        jax.config.update(name, previous)


def compile_step(
    step: Step, pipeline: InputPipeline, name: str, num_processes: int = 1
) -> jax.stages.Compiled:
    """Compiles a step ahead of time for each shape of a dataset's batches.

    JAX caches the executable, so the first call to the step with such a batch does not compile the
    step again. Matmuls whose results XLA may permute are patched before compilation, with a
    warning. Later calls for the same batch shapes return the same executable.

    Args:
      step: The train, eval or decode step.
      pipeline: The dataset, which determines the batch shapes.
      name: The dataset's name, such as "datasets.train".
      num_processes: Number of processes on this host that will run the step.

    Returns:
      The executable for batches of the shape `element_spec`.

    Raises:
      OutOfMemory: The devices are simulated, and the step needs more memory than the host has.
    """
    compiled = [_compile_for(step, spec, name, num_processes) for spec in pipeline.element_specs()]
    return compiled[0]


def _compile_for(step: Step, spec: Any, name: str, num_processes: int) -> jax.stages.Compiled:
    leaves, structure = jax.tree.flatten(spec)
    key = structure, *((x.shape, jnp.dtype(x.dtype)) for x in leaves)
    executables = _compiled.setdefault(step, {})
    if key in executables:
        return executables[key]
    compiled = patch_matmuls(step.lower(spec), step.task_on_mesh.mesh).compile()
    devices = step.task_on_mesh.mesh.local_devices
    advice = f"Lower {name}.batch_size, or use smaller examples" + (
        f"; {SMALLER_STEP}" if step.trains else "; set fprop_dtype=bfloat16"
    )
    if len(devices) > 1:
        advice += "; use fewer simulated devices, because each holds a copy of replicated arrays"
    host_memory.check_program_fits(
        compiled,
        devices,
        f"{step.title} on {name}",
        f"{advice}; or use hosts with more memory.",
        num_processes,
    )
    executables[key] = compiled
    return compiled


def compile_init(partitioner: Partitioner, key: jax.Array) -> None:
    """Compiles the initialization of the state. Raises OutOfMemory like `compile_step`."""
    lowered = partitioner.init.trace(key).lower()
    host_memory.check_program_fits(
        patch_matmuls(lowered, partitioner.mesh).compile(),
        partitioner.mesh.local_devices,
        "Initializing the state",
        f"{SMALLER_STATE}.",
    )


def compile_together(steps: Iterable[tuple[Step, InputPipeline, str]]) -> None:
    """Compiles steps in all processes, and waits until every process has compiled them.

    Without this, processes that compile fast would time out in the first collective, because Gloo,
    which connects processes on CPU, waits at most 30 s. If there is a single process, nothing is
    compiled here.

    Args:
      steps: A tuple (step, dataset, dataset name such as "datasets.train") for each step.

    Raises:
      OutOfMemory: The devices are simulated, and the steps of all processes on this host together
        need more memory than the host has.
    """
    if processes.count() > 1:
        for step, pipeline, name in steps:
            compile_step(step, pipeline, name, processes.count_on_this_host())
        processes.exchange("the steps are compiled", "", 3600)
