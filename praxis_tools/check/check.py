"""The state of a check: its references, its computed runs, its comparisons."""

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import fiddle as fdl
import jax
import numpy as np

from praxis_lite.config.build import build
from praxis_lite.core.errors import ConfigError, require
from praxis_lite.core.partitioner.gradient_strategy import Gradients
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.core.sharding.batch_sharding import num_rows_of
from praxis_lite.core.task import Task
from praxis_lite.experiment.experiment import Job
from praxis_lite.inputs.base import TRAIN
from praxis_tools.check import tolerances
from praxis_tools.check.certificate import Certificate, Comparison
from praxis_tools.check.meshes import Shape
from praxis_tools.check.parts import data, properties
from praxis_tools.check.runs.batch_parts import devices_in_turn, micro_batches_in_turn
from praxis_tools.check.runs.on_mesh import (
    Batch,
    Leaves,
    TaskRunner,
    cut,
    leaves_of,
    on_mesh,
    reporting,
    structs,
)
from praxis_tools.check.runs.states import first_state, nudged

T = TypeVar("T")


class CheckFailed(Exception):
    """Ends a check: comparisons failed.

    Attributes:
      runner: on the mesh on which they failed; None: no mesh was in use.
      failed: in the order in which they were made.
    """

    def __init__(self, runner: TaskRunner | None, failed: Sequence[Comparison]):
        super().__init__(failed)
        self.runner, self.failed = runner, failed


class Check:
    """A check of an experiment: its references, and its comparisons.

    Args:
      config: of the job.
      experiment: its full name.
      num_steps: of training on the experiment's own mesh.
      parts: names of `on_meshes.PARTS`, which alone are made; None: all.
      packages: whose functions and classes the config may name, besides the library's.
      print_text: called with a line of text for each part of the work.

    Attributes:
      certificate: of what was compared so far.
      batches: the first of the training data, cut to few rows.
      full_batch: the first of them with all of its rows; None if none was cut off.
      evaluated: the first of `batches`, and by description each batch of other shapes that the job
        evaluates or trains on, with all of its rows.
      state: to train from, NumPy arrays of true shapes in float64.
      nudged: the same, its weights moved by rounding.
      own_shape: of the experiment's own mesh, or of the mesh checked in its place.
      num_rows: of a batch.
      meshes: those that were checked, by their shapes.
      couplings: descriptions of what makes a row's results depend on other rows; usually none.
    """

    def __init__(
        self, config: "fdl.Config[Job]", experiment: str, *, num_steps: int,
        parts: Sequence[str] | None, packages: Sequence[str], print_text: Callable[[str], None],
    ):
        self.config, self.job, self.packages = config, build(config), packages
        self.certificate, self.meshes = Certificate(experiment), {}
        self.num_steps, self._parts, self._print = num_steps, parts, print_text
        self._start = time.monotonic()
        self.seed, self.task = self.job.run.seed, reporting(self.job.task)
        self.couplings = properties.couplings(self.task)
        self._references: dict[int | str, TaskRunner] = {}
        self._on_meshes: dict[Shape, TaskRunner] = {}
        self._trained: dict[Any, tuple[list[Leaves], Leaves]] = {}
        self.full_batch: Batch | None = None

    def prepare(self, own_shape: Shape) -> None:
        """Loads the batches and builds the state to train from."""
        self.own_shape = own_shape
        pipeline = self.job.datasets[TRAIN]
        batches = data.first_batches(pipeline, self.num_steps)
        partitioners = [self.one_device.partitioner, self.on_mesh(own_shape).partitioner]
        self.num_rows = data.num_rows_to_check(partitioners, batches[0], pipeline.batch_size)
        if self.num_rows != pipeline.batch_size:
            self.full_batch = self.with_known_ids(batches[0])
            self.remark(
                f"A step and an evaluation are of all {pipeline.batch_size} rows of a batch, all "
                f"else of {self.num_rows}."
            )
        self.batches = [
            self.with_known_ids(data.with_rows(item, slice(self.num_rows))) for item in batches
        ]
        self.evaluated = {"": self.batches[0], **self._own_sizes()}
        if self.couplings:
            self.remark(
                f"{', '.join(self.couplings)}: no sums over rows. A batch in parts is held against "
                "one device that works on the same parts in turn."
            )
        self.note("one device: initial weights")
        self.initial = jax.device_get(self.one_device.init(self.seed))
        self.state = first_state(self.initial, self.one_device)
        self.nudged = nudged(self.state)

    def _own_sizes(self) -> dict[str, Batch]:
        """Returns the first batch of each form that the job evaluates, and the training batch."""
        found: dict[str, Batch] = {}
        if self.full_batch is not None:
            found[f", all {num_rows_of(self.full_batch)} rows"] = self.full_batch
        seen = [structs(item) for item in (self.batches[0], *found.values())]
        for name, pipeline in self.job.datasets.items():
            if name != TRAIN and pipeline.element_spec() not in seen:
                (batch,) = data.first_batches(pipeline, 1)
                found[f" of {name}"] = self.with_known_ids(batch)
                seen.append(structs(batch))
        return found

    def includes(self, part: str) -> bool:
        """Returns whether the check includes a part of `on_meshes.PARTS`."""
        return self._parts is None or part in self._parts

    def with_known_ids(self, batch: Batch) -> Batch:
        """Returns a batch with ids that the model has: of a smaller model, modulo its number."""
        folded, names = data.folded(batch, self.task.num_ids())
        if names:
            self.remark(f"Ids beyond the model's are folded into those there are: {names}.")
        return folded

    # Runs.

    @functools.cached_property
    def one_device(self) -> TaskRunner:
        """The task on a single device."""
        return self.on_one_device()

    def on_one_device(
        self, gradients: Gradients | None = None, task: Task | None = None
    ) -> TaskRunner:
        """Returns the task, or another task, on a single device, with a strategy of gradients."""
        shape, build_one = (1,) * len(self.job.mesh.axis_names), Partitioner
        if gradients is not None:
            build_one = functools.partial(Partitioner, gradients=gradients)
        return on_mesh(self.job, task or self.task, shape, build_one)

    def reference_of(self, runner: TaskRunner) -> TaskRunner:
        """Returns the single-device runner that a mesh is compared with.

        For ExplicitCollectives it processes the rows of each device in turn, for 1F1B those of
        each micro-batch.
        """
        gradients = runner.partitioner.gradients
        if gradients.num_micro_batches is not None:
            parts, in_turn = "micro-batches", micro_batches_in_turn(gradients.num_micro_batches)
        elif gradients.num_parts is not None:
            parts, in_turn = gradients.num_parts, devices_in_turn(gradients.num_parts)
        else:
            return self.one_device
        if parts not in self._references:
            self._references[parts] = self.on_one_device(in_turn)
        return self._references[parts]

    def on_mesh(self, shape: Shape, task: Task | None = None) -> TaskRunner:
        """Returns the task, or another task, on a mesh; the task itself is put on a mesh once."""
        if task is not None:
            return on_mesh(self.job, task, shape)
        if shape not in self._on_meshes:
            self._on_meshes[shape] = on_mesh(self.job, self.task, shape)
        return self._on_meshes[shape]

    @functools.cached_property
    def is_random(self) -> bool:
        """True if a training step draws random numbers."""
        return self.one_device.traced(
            self.one_device.partitioner.train_step, self.batches[0]
        ).draws

    def trained_on_one(
        self, runner: TaskRunner, num_steps: int, *, nudged: bool = False
    ) -> tuple[list[Leaves], Leaves]:
        """Returns the reports of each step, and the leaves of the last state; computed once."""
        key = id(runner), num_steps, nudged
        if key not in self._trained:
            state = self.nudged if nudged else self.state
            reports, last, _ = runner.train(state, self.batches[:num_steps], self.seed)
            losses = [report["metrics/loss/value"] for report in reports]
            require(
                np.isfinite(losses).all(), "The loss on one device", losses, "finite numbers",
                "Nothing can be compared with others: mend the experiment first.",
            )
            infinite = [
                name for report in reports for name, x in report.items()
                if name.startswith("gradients/") and not np.isfinite(x).all()
            ]
            if infinite:
                self.remark(f"On one device {infinite[0]} is not finite, and compared as it is.")
            self._trained[key] = reports, leaves_of(last)
        return self._trained[key]

    def compare_whole_batch(self, runner: TaskRunner) -> list[Comparison]:
        """Returns comparisons of a step of all rows of a batch, if batches were cut to fewer."""
        if self.full_batch is None:
            return []
        reference = self.reference_of(runner)
        runs = ((reference, self.state), (runner, self.state), (reference, self.nudged))
        expected, actual, moved = (
            on.train(state, [self.full_batch], self.seed)[0][0] for on, state in runs
        )
        compared = tolerances.by_kind(runner.name, expected, actual, moved, 0)
        return tolerances.with_what(f"all {num_rows_of(self.full_batch)} rows", compared)

    def train_once(
        self, runner: TaskRunner, batch: Batch, *, nudged: bool = False
    ) -> tuple[Leaves, Leaves]:
        """Returns the report and the leaves of the state after a step that draws nothing."""
        state = self.nudged if nudged else self.state
        (report,), last, _ = runner.train(
            state, [batch], self.seed, without_randomness=self.is_random
        )
        return report, leaves_of(last)

    def compare_initial(self, runner: TaskRunner) -> list[Comparison]:
        """Returns comparisons of the initial state on a mesh with that of a single device."""
        result, padding = cut(runner.layout, jax.device_get(runner.init(self.seed)))
        return tolerances.exact(
            runner.name, "initial state", leaves_of(self.initial), leaves_of(result)
        ) + tolerances.padding(runner.name, padding)

    def compare_training(self, runner: TaskRunner, num_steps: int) -> list[Comparison]:
        """Returns comparisons of training on a mesh with a single device.

        Of the reports of the first and the last step, then of the last state.
        """
        reference = self.reference_of(runner)
        expected, expected_state = self.trained_on_one(reference, num_steps)
        moved, moved_state = self.trained_on_one(reference, num_steps, nudged=True)
        reports, last, padding = runner.train(self.state, self.batches[:num_steps], self.seed)
        actual = []
        for step in dict.fromkeys((0, num_steps - 1)):
            actual += tolerances.by_kind(
                runner.name, expected[step], reports[step], moved[step], step
            )
        actual += tolerances.by_kind(
            runner.name, expected_state, leaves_of(last), moved_state, num_steps - 1
        )
        return actual + tolerances.padding(runner.name, padding, num_steps - 1)

    # Notes, remarks and comparisons.

    def note(self, text: str) -> None:
        """Prints the current work, and the seconds since the check began."""
        self._print(f"[{time.monotonic() - self._start:4.0f} s] {text}")

    def remark(self, text: str) -> None:
        """Adds a sentence to the notes of the certificate, once."""
        if text not in self.certificate.notes:
            self.certificate.notes.append(text)
            self._print(f"note: {text}")

    def tried(self, what: str, make: Callable[[], T]) -> T | None:
        """Returns `make()`; None, with a remark, if the experiment does not take its arguments."""
        try:
            return make()
        except (ConfigError, TypeError, ValueError) as error:
            self.remark(f"{what}: not checked. {str(error).splitlines()[0]}")
            return None

    def add(self, runner: TaskRunner | None, comparisons: Iterable[Comparison]) -> None:
        """Adds comparisons to the certificate.

        Raises:
          CheckFailed: one of them failed.
        """
        comparisons = list(comparisons)
        self.certificate.comparisons += comparisons
        failed = [x for x in comparisons if not x.is_equal]
        if failed:
            raise CheckFailed(runner, failed)
