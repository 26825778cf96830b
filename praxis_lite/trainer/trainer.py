"""The training loop: batches into steps, in their order; all else is done by hooks."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from praxis_lite.checkpoints.checkpoints import Checkpoints
from praxis_lite.core.sharding.batch_sharding import check_ids, global_batch
from praxis_lite.inputs.base import TRAIN
from praxis_lite.inputs.position import DataPosition
from praxis_lite.job.events import DISPATCH, INPUT_WAIT, STEP, events
from praxis_lite.job.processes.stop_request import StopRequest
from praxis_lite.trainer.checks.id_sizes import num_ids_of
from praxis_lite.trainer.hooks.hook import Hook, StepMade, by_name, overrides
from praxis_lite.trainer.hooks.loop import Loop
from praxis_lite.trainer.hooks.skipped_steps_report import num_skipped_in_a_row
from praxis_lite.trainer.job_on_mesh import JobOnMesh
from praxis_lite.trainer.metrics.device_clock import DeviceClock
from praxis_lite.trainer.metrics.packed import packed
from praxis_lite.trainer.spike_detector import LossSpike
from praxis_lite.trainer.starting_point import StartingPoint
from praxis_lite.trainer.step_metrics import LateMetrics, PendingStep


@dataclasses.dataclass(frozen=True)
class Trained:
    """How training ended.

    Attributes:
      step: the last one made; its checkpoint is saved.
      num_skipped: how many steps in a row, up to the last, were skipped.
      stopped_by: what asked for an early end, such as "SIGTERM", or None.
      ended_early: why a hook, such as early stopping, ended training; None: none did.
      unsound: why the last step, which is saved, is not sound; None: it is.
    """

    step: int
    num_skipped: int
    stopped_by: str | None = None
    ended_early: str | None = None
    unsound: str | None = None


def train(
    job: JobOnMesh, start: StartingPoint, checkpoints: Checkpoints, stop: StopRequest,
    hooks: Sequence[Hook], note: Callable[[str], None],
) -> Trained | LossSpike:
    """Trains to `run.num_train_steps`, or until training stops early or is asked to stop.

    A step's metrics are read one step late, while the next step runs, so the devices never wait
    for the host; before a hook that `waits` they are read at once.

    Args:
      stop: asked after every step, and before every batch of an evaluation.
      note: prints a line.

    Returns:
      How training ended; or the loss spike that ended it, for which the job is to go back.

    Raises:
      ConfigError: a batch has ids that the model has no row for; or what a hook raises.
      FailedSave: a checkpoint could not be written.
    """
    loop = Loop(
        job, start.step, start.skipped_batches, checkpoints, stop, hooks, note,
        is_resumed=start.is_resumed,
    )
    events.report(trains_from=start.step)
    with contextlib.ExitStack() as held:
        for hook in loop.hooks:
            held.enter_context(hook)
        with loop.watchdog, DeviceClock() as device_clock:
            return _run(loop, start, device_clock)


def _run(loop: Loop, start: StartingPoint, device_clock: DeviceClock) -> Trained | LossSpike:
    job, partitioner, step = loop.job, loop.job.partitioner, start.step
    state = start.take_state()
    for name, hook in by_name(loop.hooks).items():
        hook.restore(start.hooks.get(name))
        hook.before_training(loop, state)
    late = LateMetrics(loop)
    acting = [hook for hook in loop.hooks if overrides(hook, "after_step")]
    key, taken = partitioner.key(job.run.seed), _batches(loop)
    with events.phase(STEP):
        while not loop.is_last(step):
            step += 1
            loop.checkpoints.raise_if_failed()
            index, inputs, batch, first_row, input_time = next(taken)
            if step == loop.first_step + 1:
                late.last_time += loop.compile()
            called = time.perf_counter()
            # The name by which xprof finds the steps in a profile.
            in_profile = jax.profiler.StepTraceAnnotation("train", step_num=step)
            with in_profile, events.phase(DISPATCH, step):
                state, outputs = partitioner.train_step(state, batch, key)
            dispatch_time = time.perf_counter() - called
            on_devices = device_clock.began(called, outputs["metrics"]["loss"])
            on_the_way = packed(outputs)
            loop.stop.step_ended()
            loop.asked_to_stop()
            if spike := late.read():
                return spike
            late.pending = PendingStep(
                step, index, on_the_way, inputs, first_row, input_time, dispatch_time, on_devices
            )
            loop.results = None
            for hook in acting:
                if hook.is_due(step, loop.is_last(step)):
                    if hook.waits and (spike := late.read()):
                        return spike
                    step_made = StepMade(step, state, batch, key, outputs, loop.is_last(step))
                    with events.phase(f"hook {type(hook).__name__}"):
                        loop.end(hook.after_step(step_made))
                    if hook.waits:
                        late.last_time = time.perf_counter()
            loop.watchdog.step_ended(step)
        if spike := late.read():
            return spike
    if loop.reason and not loop.stops:
        loop.note(f"stopped early at step {step}: {loop.reason}")
    for hook in loop.hooks:
        hook.after_training(step)
    return Trained(step, num_skipped_in_a_row(state), loop.stopped_by(), loop.reason)


def _batches(loop: Loop) -> Iterator[tuple[int, Any, Any, int, float]]:
    """Yields each batch: its index, its rows here, the global batch, the first row, the time."""
    partitioner, pipeline = loop.job.partitioner, loop.job.datasets[TRAIN]
    num_rows = pipeline.batch_size
    rows = partitioner.process_rows(num_rows)
    num_ids = num_ids_of(partitioner.task, pipeline.element_spec())
    batches = DataPosition.of_step(loop.first_step, loop.skipped_batches).batches(pipeline, rows)
    while True:
        began = time.perf_counter()
        with events.phase(INPUT_WAIT):
            index, inputs = next(batches)
        input_time = time.perf_counter() - began
        check_ids(inputs, num_ids, f"datasets.{TRAIN}, batch {index}", first_row=rows.start)
        batch = global_batch(inputs, partitioner.mesh, num_rows)
        loop.consensus.host_worked(time.perf_counter() - began)
        yield index, inputs, batch, rows.start, input_time
