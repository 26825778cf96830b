"""Predicts and measures steps on the attached devices, for `praxis explain` and --measure."""

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.partitioner.compiled_steps import Step
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.experiment.experiment import Job
from praxis_lite.host.atomic_files import write_atomically
from praxis_lite.host.object_stores import AnyPath
from praxis_lite.inputs.base import TRAIN
from praxis_lite.trainer.compilation import compile_step
from praxis_lite.trainer.job_on_mesh import partitioner_of
from praxis_tools.plan.plan_text import figures, plan_text, seconds_text
from praxis_tools.plan.predict import plan_of_compiled
from praxis_tools.plan.residuals import (
    Residual,
    append_residual,
    apply_residuals,
    read_residuals,
)
from praxis_tools.plan.step_plan import StepPlan
from praxis_tools.plan.topology import attached_topology

_NUM_WARMUP_STEPS, _NUM_MEASURED_STEPS = 2, 10


def figures_on_attached_devices(
    partitioner: Partitioner,
) -> Callable[[Step, Any, jax.stages.Compiled, float], list[tuple[str, str]]]:
    """Returns a function that predicts a step's time and memory on the attached devices.

    That function returns the (name, value) pairs shown by `praxis explain`, or an empty list if
    `CHIPS` does not contain the devices.
    """
    topology = attached_topology(list(partitioner.mesh.devices.flat))

    def figures_of(
        step: Step, spec: Any, compiled: jax.stages.Compiled, seconds: float
    ) -> list[tuple[str, str]]:
        if topology is None:
            return []
        plan = plan_of_compiled(partitioner, step, spec, topology, compiled, seconds)
        return [*figures(plan), *(("note", note) for note in plan.notes)]

    return figures_of


def measure(
    job: Job, *, file: AnyPath | None = None, residuals: AnyPath | None = None
) -> tuple[StepPlan, list[float]]:
    """Trains ten steps on the attached devices and prints the predicted and measured step time.

    Args:
      job: Job whose train step is measured.
      file: Path of the JSON file to which the plan and the measured seconds are written, or None.
      residuals: Path of the residuals file to which the result is appended for later plans, or
        None.

    Returns:
      The plan, and the measured seconds of each step.

    Raises:
      ConfigError: `CHIPS` does not contain the devices, the residuals file is damaged, or the job
        cannot be trained.
    """
    partitioner = partitioner_of(job, "train")
    topology = attached_topology(list(partitioner.mesh.devices.flat))
    if topology is None:
        kind = partitioner.mesh.devices.flat[0].device_kind
        raise ConfigError(
            f"--measure does not support {kind}. Add the chip's peak rates to "
            "praxis_tools/plan/chips.py."
        )
    # Read the file before training, so that errors in it are raised early.
    previous_residuals = read_residuals(residuals) if residuals is not None else []
    pipeline = job.datasets[TRAIN]
    spec = pipeline.element_spec()
    start = time.monotonic()
    compiled = compile_step(partitioner.train_step, pipeline, f"datasets.{TRAIN}")
    plan = plan_of_compiled(
        partitioner, partitioner.train_step, spec, topology, compiled, time.monotonic() - start
    )
    chip, axis_sizes = topology.chip, partitioner.mesh.shape
    corrected_plan = apply_residuals(plan, chip.name, axis_sizes, residuals, previous_residuals)
    print(plan_text(corrected_plan), flush=True)
    # With length buckets, measure only the batches of the planned shape.
    shapes = jax.tree.map(lambda x: x.shape, spec)
    batches = (
        batch for batch in pipeline.batches() if jax.tree.map(lambda x: x.shape, batch) == shapes
    )
    key = partitioner.key(job.run.seed)
    state = partitioner.init(key)
    seconds = []
    for index in range(_NUM_WARMUP_STEPS + _NUM_MEASURED_STEPS):
        batch = partitioner.global_batch(next(batches))
        start = time.monotonic()
        state, outputs = partitioner.train_step(state, batch, key)
        jax.block_until_ready(outputs)
        if index >= _NUM_WARMUP_STEPS:
            seconds.append(time.monotonic() - start)
    measured = statistics.median(seconds)
    model_flops = plan.flops_per_device - plan.recomputed_flops
    print(
        f"\nmeasured  {seconds_text(measured)} per step (median of {_NUM_MEASURED_STEPS}; "
        f"{seconds_text(min(seconds))} to {seconds_text(max(seconds))}), MFU "
        f"{model_flops / measured / chip.peak():.1%}\n"
        f"predicted {seconds_text(plan.step_seconds)}: "
        f"{plan.step_seconds / measured:.2f} times the measured time"
    )
    residual = Residual(
        chip=chip.name,
        step=plan.step,
        axis_sizes=dict(axis_sizes),
        flops_per_device=plan.flops_per_device,
        predicted_seconds=plan.step_seconds,
        measured_seconds=measured,
        source="--measure",
    )
    if residuals is None:
        print("residual  not saved: set --residuals=FILE or --job_log_dir=DIR to save it")
    elif jax.process_index() == 0:
        append_residual(residuals, residual)
        print(f"residual  {residual.ratio:.3g}, saved to {residuals} for later plans")
    if file is not None:
        record = plan.to_json() | {"measured_seconds": seconds}
        write_atomically(file, json.dumps(record, indent=1).encode())
    return plan, seconds
