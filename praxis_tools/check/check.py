"""The state of a running check.

The state consists of the runner on each mesh, cached results and the comparisons made so far.
"""

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import fiddle as fdl
import jax
import numpy as np

from praxis_lite.config.build import build
from praxis_lite.core.errors import Error, require
from praxis_lite.core.partitioner.gradient_strategy import GradientFunctions
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.core.sharding.batch_sharding import num_rows_of
from praxis_lite.core.task import Task
from praxis_lite.experiment.experiment import Job
from praxis_lite.inputs.base import TRAIN
from praxis_tools.check import tolerances
from praxis_tools.check.certificate import Certificate, Comparison
from praxis_tools.check.meshes import Shape
from praxis_tools.check.parts import data, properties
from praxis_tools.check.runs.batch_parts import devices_in_turn, microbatches_in_turn
from praxis_tools.check.runs.on_mesh import (
    Batch,
    Leaves,
    TaskRunner,
    leaves_of,
    on_mesh,
    structs,
    unpad,
    with_reported_gradients,
)
from praxis_tools.check.runs.states import first_state, nudge_state

T = TypeVar("T")


class CheckFailed(Exception):
    """Raised when a comparison fails, to end the check.

    Attributes:
      runner: Runner on the mesh where comparisons failed, or None if no mesh was involved.
      failed: The failed comparisons, in the order in which they were made.
    """

    def __init__(self, runner: TaskRunner | None, failed: Sequence[Comparison]):
        super().__init__(failed)
        self.runner, self.failed = runner, failed


class Check:
    """A running check of an experiment.

    Args:
      config: The job's config.
      experiment: Full name of the experiment.
      num_steps: Number of training steps on the experiment's own mesh.
      parts: Names of the parts to run, from `on_meshes.PARTS`, or None for all parts.
      packages: Packages whose functions and classes the config may reference, in addition to the
        library.
      print_text: Function called with a line of text for each part of the check.

    Attributes:
      certificate: The comparisons made so far.
      batches: The first training batches, reduced to `num_rows` rows.
      full_batch: The first training batch with all rows, or None if batches were not reduced.
      evaluated: Maps descriptions to evaluation batches: the first batch in `batches` (key ""), and
        a full-size batch for each other shape that the job evaluates or trains on.
      state: State to train from, as unpadded NumPy arrays in float64.
      nudged: The same state with weights perturbed by rounding errors.
      own_shape: Shape of the experiment's own mesh, or of the mesh that is checked instead.
      num_rows: Number of rows in each of `batches`.
      meshes: Maps the shape of each checked mesh to its runner.
      couplings: Reasons why the results for a row depend on other rows; usually empty.
    """

    def __init__(
        self,
        config: "fdl.Config[Job]",
        experiment: str,
        *,
        num_steps: int,
        parts: Sequence[str] | None,
        packages: Sequence[str],
        print_text: Callable[[str], None],
    ):
        self.config, self.job, self.packages = config, build(config), packages
        self.certificate = Certificate(experiment)
        self.meshes: dict[Shape, TaskRunner] = {}
        self.num_steps, self._parts, self._print = num_steps, parts, print_text
        self._start = time.monotonic()
        self.seed, self.task = self.job.run.seed, with_reported_gradients(self.job.task)
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
            self.add_note(
                f"One step and one evaluation use all {pipeline.batch_size} rows of a batch. "
                f"Everything else uses {self.num_rows} rows."
            )
        self.batches = [
            self.with_known_ids(data.with_rows(batch, slice(self.num_rows))) for batch in batches
        ]
        self.evaluated = {"": self.batches[0], **self._full_size_batches()}
        if self.couplings:
            self.add_note(
                f"{', '.join(self.couplings)}: rows depend on each other, so sums over rows are "
                "not compared. If a mesh splits a batch into parts, its results are compared with "
                "those of one device that processes the same parts one after another."
            )
        self.print_progress("one device: initial weights")
        self.initial = jax.device_get(self.one_device.init(self.seed))
        self.state = first_state(self.initial, self.one_device)
        self.nudged = nudge_state(self.state)

    def _full_size_batches(self) -> dict[str, Batch]:
        """Returns batches to evaluate: the full training batch and one batch per other shape."""
        found: dict[str, Batch] = {}
        if self.full_batch is not None:
            found[f", all {num_rows_of(self.full_batch)} rows"] = self.full_batch
        seen_specs = [structs(batch) for batch in (self.batches[0], *found.values())]
        for name, pipeline in self.job.datasets.items():
            for full_batch in data.first_batch_of_each_shape(pipeline):
                batch = self.with_known_ids(full_batch)
                if structs(batch) not in seen_specs:
                    shape = f", shape {next(iter(batch.values())).shape}"
                    has_several = len(pipeline.element_specs()) > 1
                    found[f" of {name}{shape * has_several}"] = batch
                    seen_specs.append(structs(batch))
        return found

    def includes(self, part: str) -> bool:
        """Returns whether the check includes a part of `on_meshes.PARTS`."""
        return self._parts is None or part in self._parts

    def with_known_ids(self, batch: Batch) -> Batch:
        """Returns a batch whose ids are valid for the model.

        The model may support fewer ids than the dataset contains, because of --shrink.
        """
        folded, names = data.fold_ids(batch, self.task.num_ids())
        if names:
            self.add_note(f"Ids outside of the model's range are wrapped around: {names}.")
        return folded

    # Runners.

    @functools.cached_property
    def one_device(self) -> TaskRunner:
        """Runner for the task on a single device."""
        return self.on_one_device()

    def on_one_device(
        self, gradients: GradientFunctions | None = None, task: Task | None = None
    ) -> TaskRunner:
        """Returns a runner on a single device.

        Args:
          gradients: Strategy that computes the gradients, or None for the default strategy.
          task: Task to run; defaults to the task being checked.
        """
        shape = (1,) * len(self.job.mesh.axis_names)
        build: Callable[..., Partitioner] = Partitioner
        if gradients is not None:
            build = functools.partial(Partitioner, gradients=gradients)
        return on_mesh(self.job, task or self.task, shape, build)

    def reference_of(self, runner: TaskRunner) -> TaskRunner:
        """Returns the single-device runner whose results are compared with results on a mesh.

        With ExplicitCollectives, the single device processes the rows of each mesh device in turn.
        With 1F1B, the single device processes the rows of each microbatch in turn.
        """
        functions = runner.partitioner.gradient_functions
        key: int | str
        if functions.num_microbatches is not None:
            key, in_turn = "microbatches", microbatches_in_turn(functions.num_microbatches)
        elif functions.num_parts is not None:
            key, in_turn = functions.num_parts, devices_in_turn(functions.num_parts)
        else:
            return self.one_device
        if key not in self._references:
            self._references[key] = self.on_one_device(in_turn)
        return self._references[key]

    def on_mesh(self, shape: Shape, task: Task | None = None) -> TaskRunner:
        """Returns a runner for `task` on a mesh; `task` defaults to the task being checked.

        Runners for the task being checked are cached.
        """
        if task is not None:
            return on_mesh(self.job, task, shape)
        if shape not in self._on_meshes:
            self._on_meshes[shape] = on_mesh(self.job, self.task, shape)
        return self._on_meshes[shape]

    @functools.cached_property
    def is_random(self) -> bool:
        """Whether a training step draws random numbers."""
        return self.one_device.traced(self.one_device.partitioner.train_step, self.batches[0]).draws

    def train_reference(
        self, runner: TaskRunner, num_steps: int, *, nudged: bool = False
    ) -> tuple[list[Leaves], Leaves]:
        """Trains on a single device, caching the results.

        Args:
          runner: Runner on a single device.
          num_steps: Number of steps.
          nudged: Whether to start from perturbed weights.

        Returns:
          (reports, leaves): The report for each step, and the leaves of the last state.

        Raises:
          ConfigError: The loss is not finite.
        """
        key = id(runner), num_steps, nudged
        if key not in self._trained:
            state = self.nudged if nudged else self.state
            reports, last, _ = runner.train(state, self.batches[:num_steps], self.seed)
            losses = [report["metrics/loss/value"] for report in reports]
            require(
                bool(np.isfinite(losses).all()),
                "The loss on one device",
                losses,
                "finite numbers",
                "Fix the experiment first: infinities and NaNs cannot be compared.",
            )
            infinite = [
                name
                for report in reports
                for name, x in report.items()
                if name.startswith("gradients/") and not np.isfinite(x).all()
            ]
            if infinite:
                self.add_note(f"{infinite[0]} is not finite on one device, but is still compared.")
            self._trained[key] = reports, leaves_of(last)
        return self._trained[key]

    def compare_full_batch(self, runner: TaskRunner) -> list[Comparison]:
        """Compares a step on a full batch between a mesh and a single device.

        Returns no comparisons if `batches` already contains full batches.
        """
        full_batch = self.full_batch
        if full_batch is None:
            return []
        reference = self.reference_of(runner)
        runs = ((reference, self.state), (runner, self.state), (reference, self.nudged))
        expected, actual, nudged = (
            runner.train(state, [full_batch], self.seed)[0][0] for runner, state in runs
        )
        comparisons = tolerances.by_kind(runner.name, expected, actual, nudged, 0)
        return tolerances.with_suffix(f"all {num_rows_of(full_batch)} rows", comparisons)

    def train_once(
        self, runner: TaskRunner, batch: Batch, *, nudged: bool = False
    ) -> tuple[Leaves, Leaves]:
        """Trains one step without randomness, and returns its report and the new state's leaves."""
        state = self.nudged if nudged else self.state
        (report,), last, _ = runner.train(
            state, [batch], self.seed, without_randomness=self.is_random
        )
        return report, leaves_of(last)

    def compare_initial(self, runner: TaskRunner) -> list[Comparison]:
        """Compares the initial state on a mesh with the initial state on a single device."""
        actual, padding = unpad(runner.layout, jax.device_get(runner.init(self.seed)))
        return tolerances.exact(
            runner.name, "initial state", leaves_of(self.initial), leaves_of(actual)
        ) + tolerances.padding(runner.name, padding)

    def compare_training(self, runner: TaskRunner, num_steps: int) -> list[Comparison]:
        """Compares training on a mesh with training on a single device.

        The reports for the first and last steps and the last state are compared.
        """
        reference = self.reference_of(runner)
        expected, expected_state = self.train_reference(reference, num_steps)
        nudged, nudged_state = self.train_reference(reference, num_steps, nudged=True)
        reports, last, padding = runner.train(self.state, self.batches[:num_steps], self.seed)
        comparisons = []
        for step in dict.fromkeys((0, num_steps - 1)):
            comparisons += tolerances.by_kind(
                runner.name, expected[step], reports[step], nudged[step], step
            )
        comparisons += tolerances.by_kind(
            runner.name, expected_state, leaves_of(last), nudged_state, num_steps - 1
        )
        return comparisons + tolerances.padding(runner.name, padding, num_steps - 1)

    # Progress, notes and comparisons.

    def print_progress(self, text: str) -> None:
        """Prints what is being checked and the number of seconds since the check began."""
        self._print(f"[{time.monotonic() - self._start:4.0f} s] {text}")

    def add_note(self, text: str) -> None:
        """Adds a note to the certificate, unless the certificate already contains this note."""
        if text not in self.certificate.notes:
            self.certificate.notes.append(text)
            self._print(f"note: {text}")

    def run_or_skip(self, name: str, run: Callable[[], T]) -> T | None:
        """Returns `run()`, or adds a note and returns None if the call is not supported."""
        try:
            return run()
        except (Error, TypeError, ValueError) as error:
            self.add_note(f"{name}: not checked. {str(error).splitlines()[0]}")
            return None

    def add(self, runner: TaskRunner | None, comparisons: Iterable[Comparison]) -> None:
        """Adds comparisons to the certificate.

        Raises:
          CheckFailed: One of the comparisons failed.
        """
        comparisons = list(comparisons)
        self.certificate.comparisons += comparisons
        failed = [x for x in comparisons if not x.is_equal]
        if failed:
            raise CheckFailed(runner, failed)
