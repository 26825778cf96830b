"""The training loop, which feeds batches to the train step; hooks do everything else.

The metrics and times of a step are read while the next step runs, so that the devices never wait
for the host. `metrics/step_times.py` defines the times.
"""

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from praxis_lite.checkpoints.checkpoints import Checkpoints
from praxis_lite.core.sharding.batch_sharding import check_ids, global_batch
from praxis_lite.inputs.base import TRAIN
from praxis_lite.inputs.position import DataPosition
from praxis_lite.job.events import (
    DISPATCH,
    EVALUATION,
    INPUT_WAIT,
    ON_DEVICES,
    SAVE,
    STEP,
    events,
)
from praxis_lite.job.processes.stop_request import StopRequest
from praxis_lite.trainer.checks.id_sizes import num_ids_of
from praxis_lite.trainer.hooks.hook import DispatchedStep, Hook, StepMetrics, by_name
from praxis_lite.trainer.hooks.loop_state import LoopState
from praxis_lite.trainer.hooks.skipped_steps_report import num_skipped_in_a_row
from praxis_lite.trainer.job_on_mesh import JobOnMesh
from praxis_lite.trainer.metrics.device_clock import DeviceClock, DeviceSpan
from praxis_lite.trainer.metrics.packed import Packed, pack_scalars
from praxis_lite.trainer.metrics.step_times import (
    DEVICE_TIME,
    DISPATCH_TIME,
    EVALUATION_TIME,
    INPUT_TIME,
    SAVE_TIME,
    STEP_TIME,
)
from praxis_lite.trainer.spike_detector import LossSpike
from praxis_lite.trainer.starting_point import StartingPoint


@dataclasses.dataclass(frozen=True)
class TrainingResult:
    """How training ended.

    Attributes:
      step: The last training step; its checkpoint is saved.
      num_skipped: Number of consecutive skipped steps at the end of training.
      stopped_by: The request that stopped training early, such as "SIGTERM", or None.
      ended_early: The reason why a hook such as early stopping ended training, or None.
      unsound: The reason why the final weights should not be used, such as a NaN evaluation loss,
        or None.
    """

    step: int
    num_skipped: int
    stopped_by: str | None = None
    ended_early: str | None = None
    unsound: str | None = None


def run_training_loop(
    job: JobOnMesh,
    start: StartingPoint,
    checkpoints: Checkpoints,
    stop: StopRequest,
    hooks: Sequence[Hook],
) -> TrainingResult | LossSpike:
    """Trains until `run.num_train_steps`, a hook's decision to end, or a request to stop.

    The metrics of a step are read one step late. Before a hook with `waits=True`, they are read
    immediately.

    Args:
      job: The job, placed on its mesh.
      start: The state and step to train from; the state is donated.
      checkpoints: The checkpoints to which hooks save.
      stop: The stop request, polled after every step and before every batch of an evaluation.
      hooks: All hooks, in the order in which they are called.

    Returns:
      How training ended, or a loss spike if the job must be rolled back to an earlier step.

    Raises:
      ConfigError: A batch contains ids outside the model's vocabulary, or a hook raised the error.
      FailedSave: A checkpoint could not be written.
    """
    loop = LoopState(
        job,
        start.step,
        start.skipped_batches,
        checkpoints,
        stop,
        hooks,
        is_resumed=start.is_resumed,
    )
    events.report(trains_from=start.step)
    with contextlib.ExitStack() as stack:
        for hook in loop.hooks:
            stack.enter_context(hook)
        with loop.watchdog, DeviceClock() as device_clock:
            return _run_steps(loop, start, device_clock)


def _run_steps(
    loop: LoopState, start: StartingPoint, device_clock: DeviceClock
) -> TrainingResult | LossSpike:
    job, partitioner, step = loop.job, loop.job.partitioner, start.step
    state = start.take_state()
    for name, hook in by_name(loop.hooks).items():
        hook.restore(start.hooks.get(name))
        hook.before_training(loop, state)
    # Each iteration dispatches a step, reads the metrics of the previous step while the devices
    # run, and calls the hooks that are due. The next iteration then reads and transfers its batch
    # while this step still runs, so there is no separate prefetch to the devices. Prefetching on
    # the host is up to the pipeline: `tf.data`, or `WithWorkers`.
    late_metrics = LateMetrics(loop)
    # Exclude hooks without this method: the loop would wait for the metrics of each step for them
    # (`Hook.waits`).
    step_hooks = [hook for hook in loop.hooks if type(hook).after_step is not Hook.after_step]
    key, batches = partitioner.key(job.run.seed), _batches(loop)
    with events.phase(STEP):
        while not loop.is_last(step):
            step += 1
            loop.checkpoints.raise_if_failed()
            host_batch, batch = next(batches)
            if step == loop.first_step + 1:
                # Exclude compilation from the time of the first step.
                late_metrics.last_time += loop.compile()
            dispatch_start = time.perf_counter()
            # xprof identifies the steps in a profile by this name.
            annotation = jax.profiler.StepTraceAnnotation("train", step_num=step)
            with annotation, events.phase(DISPATCH, step):
                state, outputs = partitioner.train_step(state, batch, key)
            dispatch_time = time.perf_counter() - dispatch_start
            device_span = device_clock.began(dispatch_start, outputs["metrics"]["loss"])
            pending = PendingStep(
                step, host_batch, pack_scalars(outputs), dispatch_time, device_span
            )
            loop.stop.step_ended()
            loop.should_stop()
            # While the step that was just dispatched runs, read the previous step's metrics.
            if spike := late_metrics.read():
                return spike
            late_metrics.pending = pending
            loop.results = None
            for hook in step_hooks:
                if hook.is_due(step, loop.is_last(step)):
                    if hook.waits and (spike := late_metrics.read()):
                        return spike
                    is_last = loop.is_last(step)
                    dispatched = DispatchedStep(step, state, batch, key, outputs, is_last)
                    with events.phase(f"hook {type(hook).__name__}"):
                        loop.end(hook.after_step(dispatched))
                    if hook.waits:
                        late_metrics.last_time = time.perf_counter()
            loop.watchdog.step_ended(step)
        if spike := late_metrics.read():
            return spike
    if loop.reason and not loop.stops:
        loop.note(f"stopped early at step {step}: {loop.reason}")
    for hook in loop.hooks:
        hook.after_training(step)
    return TrainingResult(step, num_skipped_in_a_row(state), loop.stopped_by(), loop.reason)


def _batches(loop: LoopState) -> "Iterator[tuple[HostBatch, Any]]":
    """Yields (batch on the host, batch on the devices) for all batches that are not skipped."""
    partitioner, pipeline = loop.job.partitioner, loop.job.datasets[TRAIN]
    rows = partitioner.process_rows(pipeline.batch_size)
    num_ids = num_ids_of(partitioner.task, pipeline.element_spec())
    batches = DataPosition.of_step(loop.first_step, loop.skipped_batches).batches(pipeline, rows)
    while True:
        began = time.perf_counter()
        with events.phase(INPUT_WAIT):
            index, inputs = next(batches)
        input_time = time.perf_counter() - began
        first_row = pipeline.rows_of_batch(index, rows).start
        check_ids(inputs, num_ids, f"datasets.{TRAIN}, batch {index}", first_row=first_row)
        # Do not use `partitioner.global_batch`, because errors from its id check cannot name the
        # dataset and the batch.
        batch = global_batch(inputs, partitioner.mesh, pipeline.num_rows(index))
        loop.consensus.add_host_seconds(time.perf_counter() - began)
        yield HostBatch(index, inputs, first_row, input_time), batch


@dataclasses.dataclass(frozen=True)
class HostBatch:
    """This process's rows in a batch, on the host.

    Attributes:
      index: Index of the batch in the training data.
      inputs: The rows, as NumPy arrays.
      first_row: Index of the first of these rows in the batch.
      input_time: Seconds that the loop waited for the batch.
    """

    index: int
    inputs: Any
    first_row: int
    input_time: float


@dataclasses.dataclass(frozen=True)
class PendingStep:
    """A dispatched step whose outputs are still on the devices.

    Attributes:
      step: The step's number.
      batch: The step's batch.
      outputs: The step's outputs, packed for one transfer per dtype.
      dispatch_time: Duration of the call to the compiled step, in seconds.
      device_span: The time span during which the step runs on the devices.
    """

    step: int
    batch: HostBatch
    outputs: Packed
    dispatch_time: float
    device_span: DeviceSpan


class LateMetrics:
    """Reads the pending step's outputs, adds the step's times, and passes both to the hooks.

    Attributes:
      pending: The step to read next, or None.
      last_time: Value of `time.perf_counter()` when the previous step was read.
    """

    def __init__(self, loop: LoopState):
        self._loop, self._weight_unit = loop, loop.job.partitioner.task.weight_unit
        self._phase_seconds = events.seconds()
        self.pending: PendingStep | None = None
        self.last_time = time.perf_counter()

    def read(self) -> LossSpike | None:
        """Waits for the pending step, if any, and calls the hooks with its metrics.

        Returns:
          The loss spike to roll back from, or None. If there is one, the remaining hooks are not
          called.
        """
        if self.pending is None:
            return None
        pending, self.pending = self.pending, None
        with events.phase(ON_DEVICES):
            outputs = pending.outputs.to_host()
        now = time.perf_counter()
        events.report(made=pending.step)
        previous, self._phase_seconds = self._phase_seconds, events.seconds()
        weight = float(outputs["metrics"]["loss"][1])
        line: dict[str, Any] = {"step": pending.step}
        line |= {name: float(value) for name, (value, _) in outputs["metrics"].items()}
        line |= {name: value.item() for name, value in outputs["learner"].items()}
        line |= {
            STEP_TIME: now - self.last_time,
            INPUT_TIME: pending.batch.input_time,
            DISPATCH_TIME: pending.dispatch_time,
            DEVICE_TIME: pending.device_span.seconds(),
            EVALUATION_TIME: self._phase_seconds[EVALUATION] - previous[EVALUATION],
            SAVE_TIME: self._phase_seconds[SAVE] - previous[SAVE],
        }
        line[f"{self._weight_unit}_per_second"] = weight / line[STEP_TIME]
        self.last_time = now
        # `metrics` contains this dict, so hooks see the values that earlier hooks add.
        batch = pending.batch
        metrics = StepMetrics(
            pending.step, line, weight, batch.index, batch.inputs, batch.first_row
        )
        for hook in self._loop.hooks:
            line.update(hook.add_metrics(metrics))
        for hook in self._loop.hooks:
            hook.after_metrics(metrics)
            if self._loop.spike is not None:
                return self._loop.spike
        return None
