"""Certificates of a job that trains: its steps re-run on other meshes, and compared."""

import concurrent.futures
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
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
    are_repeatable,
    other_meshes,
    reordered,
    rolled,
    take_rows,
)
from praxis_tools.certificates.rerun import (
    MOVED,
    Measures,
    Rerun,
    Rows,
    check_room,
    compare_meshes,
    compare_moved,
    scalars_of,
)
from praxis_tools.certificates.update import UpdateCheck, UpdateComparison
from praxis_tools.check.bisect import REFUSALS
from praxis_tools.check.certificate import Comparison
from praxis_tools.check.runs.batch_parts import devices_in_turn
from praxis_tools.explain.compiler_warnings import explained_warnings

PyTree = Any
Build = Callable[[Mesh], Partitioner]
_MOST_DRAWS, _MORE_NUDGES = 4, 8
_MOST_PARTS = 64  # Of a batch that other devices work on in turn: each is in the program.


@dataclasses.dataclass(frozen=True)
class CertifiedStep:
    """The comparisons of a certificate, and the measures that a search continues from.

    Attributes:
      comparisons: in the order in which they were made.
      own, nudged, other: measures on the job's mesh, there with weights moved by rounding (once for
        each pattern), and on another mesh.
      rows: the last rows that were compared.
      is_of_device: whether bits differed after devices changed places.
      draw: the number of draws of rows before these, all of which differed.
      drawn: returns other rows of the same step, by the number of a draw.
      update: the state after the step, compared with the recomputed one; None: it was not.
    """

    comparisons: Sequence[Comparison]
    own: Measures
    nudged: Sequence[Measures]
    other: Measures | None
    rows: Rows
    is_of_device: bool
    draw: int
    drawn: Callable[[int], Rows]
    update: UpdateComparison | None = None

    @property
    def failed(self) -> list[Comparison]:
        """The comparisons that failed."""
        return [x for x in self.comparisons if not x.is_equal]


class Certifier:
    """Certifies steps of a task that trains on a mesh of several devices.

    Args:
      own: the task on the job's mesh.
      build: puts it on another mesh.
      element_spec: the shapes of a batch's rows.
      seed: of the run.
      state: one that it trains from, for its shapes.

    Attributes:
      spec, num_rows: the shapes of the rows that a certificate is made of, and how many.
      reruns: on the job's mesh, with its devices moved, and, if there is a legal one, on another.
      order: of the devices that are moved.
      is_exact: True if sums between devices do not depend on the devices' places.
      update: recomputes updates; None: it cannot be traced, or there is no memory for it.
      notes: what cannot be compared, in sentences.

    Raises:
      ConfigError: the rows of a batch cannot be cut.
    """

    def __init__(
        self, own: Partitioner, build: Build, element_spec: PyTree, seed: int, state: TrainState
    ):
        self.own, self.build, self.seed = own, build, seed
        self.notes: list[str] = []
        self._num_reported = 0
        self.scalars = jax.eval_shape(lambda: scalars_of(state))
        size = own.mesh.size
        # Neighbours stay neighbours, and no device keeps its place.
        by = 1 + int(np.random.default_rng(seed).integers(size - 1))
        self.order = rolled(range(size), size, by)
        self.spec, self.num_rows = self._few_rows(element_spec)
        moved = reordered(own.mesh, self.order)
        self.reruns = [self.rerun_on(own), self.rerun_on(build(moved)), *self._on_another_mesh()]
        self.is_exact = are_repeatable(own.mesh, moved)
        self._take = take_rows(own.mesh, self.num_rows)
        self.update: UpdateCheck | None = None
        try:
            self.update = UpdateCheck(own, element_spec, self.notes.append)
        except REFUSALS as error:  # Such as an optimizer that `jax.vmap` refuses.
            self.notes.append(f"Updates are not recomputed: {error}")
        self._ready: concurrent.futures.Future | None = None
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "certificates")

    def rerun_on(self, partitioner: Partitioner) -> Rerun:
        """Returns the task on a mesh, traced for the rows; raises the model's refusals."""
        rerun = Rerun(self.own, partitioner)
        rerun.lower(self.spec, self.scalars)
        return rerun

    def _on_another_mesh(self) -> list[Rerun]:
        """Returns the task on a legal mesh that splits other axes than the job's, if any is."""
        parts, by_hand = self.own.gradients.num_parts, []
        for mesh in other_meshes(self.own.mesh):
            try:
                item = self.build(mesh)
                if item.gradients.num_parts == parts:
                    item.train_step.check_batch(self.spec)
                    return [self.rerun_on(item)]
                by_hand.append(mesh)
            except REFUSALS:
                continue
        if by_hand and parts is not None and parts <= _MOST_PARTS:
            # Each device's rows are a batch with its own key, so their number must stay the same.
            gradients = devices_in_turn(parts)
            return [self.rerun_on(Partitioner(self.own.task, by_hand[0], gradients=gradients))]
        self.notes.append(
            "There is no other mesh that this job can be computed on, so certificates are of moved "
            "devices alone."
        )
        return []

    def _few_rows(self, spec: PyTree) -> tuple[PyTree, int]:
        """Returns the shapes of as few rows as give each device work, and how many there are."""
        batch_size, in_turn = num_rows_of(spec), self.own.task.learner.gradient_accumulation_steps
        fewest = -(-self.own.mesh.size // in_turn) * in_turn
        for num_rows in range(fewest, batch_size, in_turn):
            few = jax.tree.map(
                lambda x, n=num_rows: jax.ShapeDtypeStruct(
                    (n, *x.shape[1:]) if x.shape else (), x.dtype
                ), spec
            )
            with contextlib.suppress(ConfigError):
                self.own.train_step.check_batch(few)
                return few, num_rows
        self.own.train_step.check_batch(spec)
        return spec, batch_size

    def compile_in_thread(self) -> None:
        """Starts to compile what was traced, in a separate thread."""
        self._ready = self._thread.submit(self._compile)

    def _compile(self) -> None:
        # Warnings of costly resharding are for the training step alone.
        with explained_warnings(lambda warning: None):
            for item in self.reruns:
                item.compile()
            if self.update is not None:
                self.update.compile()

    def check_memory(self) -> None:
        """Waits for the programs, and drops another mesh that the devices have no memory for.

        Raises:
          OutOfMemory: they have none for the job's own mesh.
        """
        self._ready.result()
        for rerun in list(self.reruns):
            weights = rerun.partitioner.layout.select("mdl_vars").leaves()
            check = functools.partial(
                check_room, rerun.compile(), rerun.mesh.local_devices,
                f"A certificate on the mesh {rerun.name}",
                # The weights once more, in the layout of another mesh.
                0 if rerun.is_own else sum(leaf.bytes_per_device for leaf in weights),
            )
            if lack := _lack_of_memory("room for certificates", check):
                if rerun in self.reruns[:2]:
                    raise OutOfMemory(lack)
                self.reruns.remove(rerun)
                self.notes.append(f"{lack} So certificates are of moved devices alone.")
        self._recompute_if(UpdateCheck.check_memory)

    def keep(self, state: TrainState, step: int) -> None:
        """Copies the part of the state from which the next step's update is recomputed."""
        self._recompute_if(UpdateCheck.check_copy)
        if self.update is not None:
            self.update.keep(state, step)

    def _recompute_if(self, check: Callable[[UpdateCheck], None]) -> None:
        """Recomputes no update from here on if a check of the memory for it fails anywhere."""
        if self.update is None:
            return
        if lack := _lack_of_memory("room for updates", functools.partial(check, self.update)):
            self.update = None
            self.notes.append(f"{lack} So updates are not recomputed.")

    def rows(self, state: TrainState, batch: GlobalBatch, key: jax.Array, step: int,
             draw: int = 0) -> Rows:
        """Returns rows of a batch, chosen by the seed, the step and the number of the draw."""
        seed = (self.seed, step, draw)
        chosen = np.random.default_rng(seed).choice(batch.num_rows, self.num_rows, replace=False)
        salt = int(np.random.default_rng(seed).integers(2**32))
        return Rows(state, self._take(batch, np.sort(chosen).astype(np.int32)), key, salt)

    def certify(
        self, state: TrainState, batch: GlobalBatch, key: jax.Array, step: int
    ) -> CertifiedStep:
        """Returns the comparisons of a step with its re-runs; waits for the devices.

        The update is compared if the state before the step was kept.
        """
        drawn = functools.partial(self.rows, state, batch, key, step)
        for draw in range(_MOST_DRAWS):
            certified = self._compared(drawn(draw), draw, drawn)
            # Where rounding decides between two ways, such as between two experts, a mesh may
            # take the other one; that it does on other rows too has another cause.
            if certified.is_of_device or not differ_anywhere(certified.comparisons):
                break
        if self.update is None or not self.update.has(step):
            return certified
        if certified.is_of_device or differ_anywhere(certified.comparisons):
            self.update.drop()
            return certified
        self._ready.result()
        update = self.update.compare(
            state, batch, key, certified.own, certified.nudged[0], certified.rows.salt,
            self.reruns[0].rounding, in_any_process,
        )
        self.update.lower()
        self._ready = self._thread.submit(self._compile)
        return dataclasses.replace(
            certified, comparisons=[*certified.comparisons, *update.comparisons], update=update
        )

    def _compared(self, rows: Rows, draw: int, drawn: Callable[[int], Rows]) -> CertifiedStep:
        own, moved, *others = self.reruns
        first, second = own.measure(rows), moved.measure(rows)
        third = [other.measure(rows) for other in others]
        nudged = [own.measure(rows, own.rounding)]

        def compared() -> list[Comparison]:
            result = self.compare_order(first, nudged, second)
            for other, actual in zip(others, third, strict=True):
                result += compare_meshes(other.name, first, nudged, actual)
            return result

        result = compared()
        is_of_device = self.is_exact and differ_anywhere(x for x in result if x.mesh == MOVED)
        if not is_of_device and differ_anywhere(result):
            # Perhaps rounding was at its work where it seldom is.
            patterns = range(1, 1 + _MORE_NUDGES)
            nudged += [own.measure(rows, own.rounding, pattern) for pattern in patterns]
            result = compared()
        return CertifiedStep(
            result, first, nudged, third[0] if third else None, rows, is_of_device, draw, drawn
        )

    def compare_order(
        self, expected: Measures, nudged: Sequence[Measures], actual: Measures
    ) -> list[Comparison]:
        """Returns comparisons of the step with the devices in another order."""
        if self.is_exact:
            return compare_moved(expected, actual)
        return compare_meshes(MOVED, expected, nudged, actual)

    def new_notes(self) -> list[str]:
        """Returns the notes that were added since the last call."""
        new, self._num_reported = self.notes[self._num_reported :], len(self.notes)
        return new

    def close(self) -> None:
        """Frees the thread; waits for the program that it compiles."""
        self._thread.shutdown(wait=True, cancel_futures=True)


def _lack_of_memory(topic: str, check: Callable[[], None]) -> str:
    """Returns the message of the OutOfMemory that a check raises in any process, or ""."""
    message = ""
    try:
        check()
    except OutOfMemory as error:
        message = str(error)
    return next(filter(None, processes.exchange(topic, message)), "")


def differ_anywhere(comparisons: Iterable[Comparison]) -> bool:
    """Returns True, on all processes alike, if a comparison failed in any."""
    return in_any_process(any(not x.is_equal for x in comparisons))


def in_any_process(is_so: bool) -> bool:
    """Returns True, on all processes alike, if it is so in any.

    A device that computes wrongly may tell its own process something else than the others hear.
    """
    return any(processes.exchange("certificate", "yes" if is_so else ""))
