"""Certifies steps of a running job by re-running them on other meshes."""

import concurrent.futures
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from praxis_lite.core.errors import ConfigError, OutOfMemory
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.core.partitioner.train_state import TrainState
from praxis_lite.core.sharding.batch_sharding import GlobalBatch, num_rows_of
from praxis_lite.job import processes
from praxis_tools.certificates.placements import (
    has_order_independent_sums,
    other_meshes,
    reorder_devices,
    rotated_order,
    row_selector,
)
from praxis_tools.certificates.rerun import (
    MOVED,
    Measurements,
    Rerun,
    Rows,
    any_process_differs,
    check_device_memory,
    compare_bits,
    compare_up_to_rounding,
    scalars_of,
)
from praxis_tools.certificates.update import UpdateCheck, UpdateComparison
from praxis_tools.check.bisect import MODEL_ERRORS
from praxis_tools.check.certificate import Comparison
from praxis_tools.check.runs.batch_parts import devices_in_turn
from praxis_tools.explain.compiler_warnings import explained_warnings

PyTree = Any
Build = Callable[[Mesh], Partitioner]
_MAX_DRAWS, _NUM_MORE_NUDGES = 4, 8
_MAX_PARTS = 64  # The jaxpr of `devices_in_turn` contains a copy of the step for each part.


@dataclasses.dataclass(frozen=True)
class CertifiedStep:
    """The comparisons made for a step, and the measurements for finding the cause of a difference.

    Attributes:
      comparisons: All comparisons, in the order in which they were made.
      baseline: Measurements on the job's mesh.
      nudged: Measurements on the job's mesh with slightly perturbed weights, one for each random
        pattern of rounding errors.
      other: Measurements on a different mesh, or None if no other mesh is valid.
      rows: The last rows that were compared.
      is_device_fault: Whether bits differed after the devices were reordered.
      draw: Index of the random sample `rows`. All earlier samples had differences.
      draw_rows: Function that takes the index of a sample and returns random rows from the step's
        batch.
      update: Comparison of the state after the step, or None if it was not compared.
    """

    comparisons: Sequence[Comparison]
    baseline: Measurements
    nudged: Sequence[Measurements]
    other: Measurements | None
    rows: Rows
    is_device_fault: bool
    draw: int
    draw_rows: Callable[[int], Rows]
    update: UpdateComparison | None = None

    @property
    def failed(self) -> list[Comparison]:
        """The failed comparisons."""
        return [x for x in self.comparisons if not x.is_equal]


class Certifier:
    """Certifies steps of a job on a mesh of several devices.

    To certify a step, a few rows of its batch are re-run with the devices in a different order,
    which must produce the same bits, and on a different mesh, which must produce the same gradients
    up to rounding errors.

    Args:
      partitioner: The job's partitioner.
      build: Function that takes a mesh and returns a partitioner for the same task on this mesh.
      element_spec: Shapes and types of a batch.
      seed: The run's random seed.
      state: A train state of the job; only its shapes are used.

    Attributes:
      spec: Shapes and types of the rows that are re-run.
      num_rows: Number of these rows.
      reruns: Re-runs on the job's mesh, on the same mesh with reordered devices, and on a different
        mesh if one is valid.
      order: Order of the devices in the second re-run.
      is_exact: Whether all-reduces produce the same bits for any order of the devices.
      update: Recomputes updates; None if updates cannot be traced or do not fit in memory.
      notes: Messages about what is not compared, until `new_notes` returns them.

    Raises:
      ConfigError: The rows of a batch cannot be selected.
    """

    def __init__(
        self,
        partitioner: Partitioner,
        build: Build,
        element_spec: PyTree,
        seed: int,
        state: TrainState,
    ):
        self.partitioner, self.build, self.seed = partitioner, build, seed
        self.notes: list[str] = []
        self.scalars = jax.eval_shape(lambda: scalars_of(state))
        size = partitioner.mesh.size
        # After a rotation, every device has a new position, but neighbors remain neighbors.
        shift = 1 + int(np.random.default_rng(seed).integers(size - 1))
        self.order = rotated_order(range(size), size, shift)
        self.spec, self.num_rows = self._smallest_batch(element_spec)
        reordered = reorder_devices(partitioner.mesh, self.order)
        self.reruns = [
            self.rerun_on(partitioner),
            self.rerun_on(build(reordered)),
            *self._reruns_on_another_mesh(),
        ]
        self.is_exact = has_order_independent_sums(partitioner.mesh, reordered)
        self._select_rows = row_selector(partitioner.mesh, self.num_rows)
        self.update: UpdateCheck | None = None
        try:
            self.update = UpdateCheck(partitioner, element_spec, self.notes.append)
        except MODEL_ERRORS as error:  # For example, from an optimizer that cannot be vmapped.
            self.notes.append(f"Updates are not recomputed: {error}")
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "certificates")

    def rerun_on(self, partitioner: Partitioner) -> Rerun:
        """Returns a lowered re-run on a partitioner's mesh. The model's errors are not caught."""
        rerun = Rerun(self.partitioner, partitioner)
        rerun.lower(self.spec, self.scalars)
        return rerun

    def _reruns_on_another_mesh(self) -> list[Rerun]:
        """Returns a list with a re-run on a valid mesh of a different shape, or an empty list."""
        num_parts, meshes_with_other_parts = self.partitioner.gradient_functions.num_parts, []
        for mesh in other_meshes(self.partitioner.mesh):
            try:
                partitioner = self.build(mesh)
                if partitioner.gradient_functions.num_parts == num_parts:
                    partitioner.train_step.check_batch(self.spec)
                    return [self.rerun_on(partitioner)]
                meshes_with_other_parts.append(mesh)
            except MODEL_ERRORS:
                continue
        if meshes_with_other_parts and num_parts is not None and num_parts <= _MAX_PARTS:
            # With manual collectives, each device processes its rows with a separate key, so the
            # batch must be divided into the same parts on the other mesh.
            gradients = devices_in_turn(num_parts)
            mesh = meshes_with_other_parts[0]
            return [self.rerun_on(Partitioner(self.partitioner.task, mesh, gradients=gradients))]
        self.notes.append(
            "No other mesh is valid for this job, so certificates only compare reordered devices."
        )
        return []

    def _smallest_batch(self, spec: PyTree) -> tuple[PyTree, int]:
        """Returns the spec and size of the smallest valid batch with a row for each device."""
        batch_size = num_rows_of(spec)
        accumulation_steps = self.partitioner.task.learner.gradient_accumulation_steps
        min_rows = -(-self.partitioner.mesh.size // accumulation_steps) * accumulation_steps
        for num_rows in range(min_rows, batch_size, accumulation_steps):
            smaller_spec = jax.tree.map(
                lambda x, n=num_rows: jax.ShapeDtypeStruct(
                    (n, *x.shape[1:]) if x.shape else (), x.dtype
                ),
                spec,
            )
            with contextlib.suppress(ConfigError):
                self.partitioner.train_step.check_batch(smaller_spec)
                return smaller_spec, num_rows
        self.partitioner.train_step.check_batch(spec)
        return spec, batch_size

    def compile_in_thread(self) -> None:
        """Starts compiling in a separate thread; must precede `check_memory` and `certify`."""
        self._compilation = self._thread.submit(self._compile)

    def _compile(self) -> None:
        # Costly resharding should only cause warnings in the training step.
        with explained_warnings(lambda warning: None):
            for rerun in self.reruns:
                rerun.compile()
            if self.update is not None:
                self.update.compile()

    def check_memory(self) -> None:
        """Waits for the compilation, and drops comparisons that do not fit in memory.

        Raises:
          OutOfMemory: The re-run on the job's mesh does not fit in memory.
        """
        self._compilation.result()
        for rerun in list(self.reruns):
            weights = rerun.partitioner.layout.select("mdl_vars").leaves()
            check = functools.partial(
                check_device_memory,
                rerun.compile(),
                rerun.mesh.local_devices,
                f"A certificate on the mesh {rerun.name}",
                # A re-run on a different mesh needs a second copy of the weights in that mesh's
                # layout.
                0 if rerun.is_job_mesh else sum(leaf.bytes_per_device for leaf in weights),
            )
            if message := _out_of_memory_message("room for certificates", check):
                if rerun in self.reruns[:2]:
                    raise OutOfMemory(message)
                self.reruns.remove(rerun)
                self.notes.append(f"{message} Certificates now only compare reordered devices.")
        self._drop_update_unless(UpdateCheck.check_memory)

    def take_snapshot(self, state: TrainState, step: int) -> None:
        """Copies the arrays needed to recompute the next step's update."""
        self._drop_update_unless(UpdateCheck.check_snapshot_memory)
        if self.update is not None:
            self.update.take_snapshot(state, step)

    def _drop_update_unless(self, check: Callable[[UpdateCheck], None]) -> None:
        """Stops recomputing updates if a check raises OutOfMemory in any process."""
        if self.update is None:
            return
        check_update = functools.partial(check, self.update)
        if message := _out_of_memory_message("room for updates", check_update):
            self.update = None
            self.notes.append(f"{message} Updates are not recomputed.")

    def rows(
        self, state: TrainState, batch: GlobalBatch, key: jax.Array, step: int, draw: int = 0
    ) -> Rows:
        """Returns a random sample of rows, determined by the seed, the step and the draw."""
        seed = (self.seed, step, draw)
        chosen = np.random.default_rng(seed).choice(batch.num_rows, self.num_rows, replace=False)
        salt = int(np.random.default_rng(seed).integers(2**32))
        return Rows(state, self._select_rows(batch, np.sort(chosen).astype(np.int32)), key, salt)

    def certify(
        self, state: TrainState, batch: GlobalBatch, key: jax.Array, step: int
    ) -> CertifiedStep:
        """Compares a step with its re-runs, blocking until the devices are done.

        The update is compared only if there is a snapshot of the state from before the step.

        Args:
          state: State after the step.
          batch: The step's complete batch.
          key: The run's random key.
          step: Number of completed steps, including this step.
        """
        draw_rows = functools.partial(self.rows, state, batch, key, step)
        for draw in range(_MAX_DRAWS):
            certified = self._compare_rows(draw_rows(draw), draw, draw_rows)
            # Rounding may change a discrete decision, such as the choice of an expert, but this is
            # unlikely to happen in several samples of rows.
            if certified.is_device_fault or not any_process_differs(certified.comparisons):
                break
        if self.update is None or not self.update.has_snapshot_before(step):
            return certified
        if certified.is_device_fault or any_process_differs(certified.comparisons):
            self.update.drop_snapshot()
            return certified
        self._compilation.result()
        update = self.update.compare(
            state,
            batch,
            key,
            certified.baseline,
            certified.nudged[0],
            certified.rows.salt,
            self.reruns[0].rounding,
        )
        self.update.lower()
        self._compilation = self._thread.submit(self._compile)
        return dataclasses.replace(
            certified, comparisons=[*certified.comparisons, *update.comparisons], update=update
        )

    def _compare_rows(
        self, rows: Rows, draw: int, draw_rows: Callable[[int], Rows]
    ) -> CertifiedStep:
        job_rerun, reordered_rerun, *other_reruns = self.reruns
        baseline, reordered = job_rerun.measure(rows), reordered_rerun.measure(rows)
        others = [rerun.measure(rows) for rerun in other_reruns]
        nudged = [job_rerun.measure(rows, job_rerun.rounding)]

        def compare() -> list[Comparison]:
            comparisons = self.compare_reordered(baseline, nudged, reordered)
            for rerun, actual in zip(other_reruns, others, strict=True):
                comparisons += compare_up_to_rounding(rerun.name, baseline, nudged, actual)
            return comparisons

        comparisons = compare()
        is_device_fault = self.is_exact and any_process_differs(
            x for x in comparisons if x.mesh == MOVED
        )
        if not is_device_fault and any_process_differs(comparisons):
            # Rounding errors may be larger than the effect of the first perturbation, so measure
            # more perturbations.
            patterns = range(1, 1 + _NUM_MORE_NUDGES)
            nudged += [job_rerun.measure(rows, job_rerun.rounding, pattern) for pattern in patterns]
            comparisons = compare()
        return CertifiedStep(
            comparisons,
            baseline,
            nudged,
            others[0] if others else None,
            rows,
            is_device_fault,
            draw,
            draw_rows,
        )

    def compare_reordered(
        self, expected: Measurements, nudged: Sequence[Measurements], actual: Measurements
    ) -> list[Comparison]:
        """Compares measurements on the job's mesh with measurements on reordered devices."""
        if self.is_exact:
            return compare_bits(expected, actual)
        return compare_up_to_rounding(MOVED, expected, nudged, actual)

    def new_notes(self) -> list[str]:
        """Returns the notes added since the last call."""
        new = list(self.notes)
        self.notes.clear()
        return new

    def close(self) -> None:
        """Waits for the running compilation and stops the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)


def _out_of_memory_message(topic: str, check: Callable[[], None]) -> str:
    """Returns the message if a check raises OutOfMemory in any process, or "" otherwise."""
    message = ""
    try:
        check()
    except OutOfMemory as error:
        message = str(error)
    return next(filter(None, processes.exchange(topic, message)), "")
