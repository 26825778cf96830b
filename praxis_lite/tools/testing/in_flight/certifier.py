"""The certificates of a job in flight: the steps made again, their meshes, the comparisons."""

import concurrent.futures
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
from praxis_lite.core.sharding.inputs import GlobalBatch, num_rows_of
from praxis_lite.run.job import processes
from praxis_lite.tools.explain.compiler_warnings import explained_warnings
from praxis_lite.tools.testing.bisect import REFUSALS
from praxis_lite.tools.testing.certificate import Comparison
from praxis_lite.tools.testing.in_flight import again
from praxis_lite.tools.testing.in_flight.again import Measures, Placement, Rows
from praxis_lite.tools.testing.in_flight.measured import scalars_of
from praxis_lite.tools.testing.in_flight.memory import check_room
from praxis_lite.tools.testing.in_flight.placements import (
    are_repeatable,
    bytes_of_weights,
    chosen_rows,
    other_meshes,
    reordered,
    rolled,
    take_rows,
)
from praxis_lite.tools.testing.in_flight.update import UpdateCheck, UpdateCompared
from praxis_lite.tools.testing.runs.parts import devices_in_turn

PyTree = Any
Build = Callable[[Mesh], Partitioner]
_MOST_DRAWS, _MORE_NUDGES = 4, 8
_MOST_PARTS = 64  # Of a batch that other devices work on in turn: each is in the program.


@dataclasses.dataclass(frozen=True)
class Made:
    """The comparisons of a certificate, and the measures that a search goes on from.

    Attributes:
      comparisons: in the order in which they were made.
      own, nudged, other: measures on the job's mesh, there with weights moved by rounding, each
        time another way, and on another mesh.
      rows: the last rows that were compared.
      is_of_device: bits differed when devices changed places.
      draw: of these rows; after the first the meshes were compared on others before.
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
    update: UpdateCompared | None = None

    @property
    def failed(self) -> list[Comparison]:
        """The comparisons that failed."""
        return [x for x in self.comparisons if not x.is_equal]


class Certifier:
    """Makes certificates of a task that trains on a mesh of several devices.

    Args:
      own: the task on the job's mesh.
      build: puts it on another mesh.
      element_spec: the shapes of a batch's rows.
      seed: of the run.
      state: one that it trains from, for its shapes.

    Attributes:
      spec, num_rows: the shapes of the rows that a certificate is made of, and how many.
      places: the job's mesh, its devices moved, and, if there is a legal one, another mesh.
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
        self._num_said = 0
        self.scalars = jax.eval_shape(lambda: scalars_of(state))
        size = own.mesh.size
        # Neighbours stay neighbours, and no device keeps its place.
        by = 1 + int(np.random.default_rng(seed).integers(size - 1))
        self.order = rolled(range(size), size, by)
        self.spec, self.num_rows = self._few_rows(element_spec)
        moved = reordered(own.mesh, self.order)
        self.places = [self.placed(own), self.placed(build(moved)), *self._on_another_mesh()]
        self.is_exact = are_repeatable(own.mesh, moved)
        self._take = take_rows(own.mesh, self.num_rows)
        self.update: UpdateCheck | None = None
        try:
            self.update = UpdateCheck(own, element_spec, self.notes.append)
        except REFUSALS as error:  # Such as an optimizer of which JAX cannot map what it does.
            self.notes.append(f"Updates are not recomputed: {error}")
        self._ready: concurrent.futures.Future | None = None
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "certificates")

    def placed(self, partitioner: Partitioner) -> Placement:
        """Returns the task on a mesh, traced for the rows; raises the model's refusals."""
        place = Placement(self.own, partitioner)
        place.lower(self.spec, self.scalars)
        return place

    def _on_another_mesh(self) -> list[Placement]:
        """Returns the task on a legal mesh that splits other axes than the job's, if any is."""
        parts, by_hand = self.own.gradients.num_parts, []
        for mesh in other_meshes(self.own.mesh):
            try:
                item = self.build(mesh)
                if item.gradients.num_parts == parts:
                    item.train_step.check_batch(self.spec)
                    return [self.placed(item)]
                by_hand.append(mesh)
            except REFUSALS:
                continue
        if by_hand and parts is not None and parts <= _MOST_PARTS:
            # Each device's rows are a batch with a key of its own, and there have to be as many.
            gradients = devices_in_turn(parts)
            return [self.placed(Partitioner(self.own.task, by_hand[0], gradients=gradients))]
        self.notes.append(
            "There is no other mesh that this job can be computed on, so certificates are of moved "
            "devices alone."
        )
        return []

    def _few_rows(self, spec: PyTree) -> tuple[PyTree, int]:
        """Returns the shapes of as few rows as give each device work, and how many there are."""
        batch_size, in_turn = num_rows_of(spec), self.own.task.learner.gradient_accumulation_steps
        fewest = -(-self.own.mesh.size // in_turn) * in_turn
        for num_rows in (*range(fewest, batch_size, in_turn), batch_size):
            few = jax.tree.map(
                lambda x, n=num_rows: jax.ShapeDtypeStruct((n, *x.shape[1:]) if x.shape else (),
                                                           x.dtype), spec
            )
            try:
                self.own.train_step.check_batch(few)
                return few, num_rows
            except ConfigError:
                if num_rows == batch_size:
                    raise
        raise AssertionError(batch_size)

    def compile_beside(self) -> None:
        """Begins to compile what was traced, in a thread beside training."""
        self._ready = self._thread.submit(self._compile)

    def _compile(self) -> None:
        # What a mesh reshards at a cost is said of the training step alone.
        with explained_warnings(lambda warning: None):
            for item in self.places:
                item.compile()
            if self.update is not None:
                self.update.compile()

    def check_memory(self) -> None:
        """Waits for the programs, and drops another mesh that the devices have no memory for.

        Raises:
          OutOfMemory: they have none for the job's own mesh.
        """
        self._ready.result()
        for item in list(self.places):
            lack = ""
            try:
                check_room(
                    item.compile(), item.mesh.local_devices,
                    f"A certificate on the mesh {item.name}",
                    # The weights once more, as they lie on another mesh.
                    0 if item.is_own else bytes_of_weights(item.partitioner.layout),
                )
            except OutOfMemory as error:
                lack = str(error)
            if lack := next(filter(None, processes.exchange("room for certificates", lack)), ""):
                if item in self.places[:2]:
                    raise OutOfMemory(lack)
                self.places.remove(item)
                self.notes.append(f"{lack} So certificates are of moved devices alone.")
        self._tried_update(UpdateCheck.check_memory)

    def keep(self, state: TrainState, step: int) -> None:
        """Copies the part of the state from which the next step's update is recomputed."""
        self._tried_update(UpdateCheck.check_copy)
        if self.update is not None:
            self.update.keep(state, step)

    def _tried_update(self, check: Callable[[UpdateCheck], None]) -> None:
        """Recomputes no update from here on if a check of the memory for it fails anywhere."""
        lack = ""
        if self.update is None:
            return
        try:
            check(self.update)
        except OutOfMemory as error:
            lack = str(error)
        if lack := next(filter(None, processes.exchange("room for updates", lack)), ""):
            self.update = None
            self.notes.append(f"{lack} So updates are not recomputed.")

    def rows(self, state: TrainState, batch: GlobalBatch, key: jax.Array, step: int,
             draw: int = 0) -> Rows:
        """Returns rows of a batch, chosen by the seed, the step and the number of the draw."""
        seed = (self.seed, step, draw)
        chosen = chosen_rows(batch, self.num_rows, seed)
        salt = int(np.random.default_rng(seed).integers(2**32))
        return Rows(state, self._take(batch, chosen), key, salt)

    def make(self, state: TrainState, batch: GlobalBatch, key: jax.Array, step: int) -> Made:
        """Returns the comparisons of a step made again; waits for the devices.

        The update is compared if the state before the step was kept.
        """
        drawn = functools.partial(self.rows, state, batch, key, step)
        for draw in range(_MOST_DRAWS):
            made = self._made(drawn(draw), draw, drawn)
            # Where rounding decides between two ways, such as between two experts, a mesh may
            # take the other one; that it does on other rows too has another cause.
            if made.is_of_device or not in_any_process(bool(made.failed)):
                break
        if self.update is None or not self.update.has(step):
            return made
        if made.is_of_device or in_any_process(bool(made.failed)):
            self.update.drop()
            return made
        self._ready.result()
        update = self.update.compare(
            state, batch, key, made.own, made.nudged[0], made.rows.salt, self.places[0].rounding,
            in_any_process,
        )
        self.update.lower()
        self._ready = self._thread.submit(self._compile)
        return dataclasses.replace(
            made, comparisons=[*made.comparisons, *update.comparisons], update=update
        )

    def _made(self, rows: Rows, draw: int, drawn: Callable[[int], Rows]) -> Made:
        own, moved, *others = self.places
        first, second = own.measure(rows), moved.measure(rows)
        third = [other.measure(rows) for other in others]
        nudged = [own.measure(rows, own.rounding)]
        exact = again.compare_moved(first, second) if self.is_exact else []
        is_of_device = in_any_process(any(not x.is_equal for x in exact))

        def compared() -> list[Comparison]:
            by_rounding = [] if self.is_exact else again.compare_meshes(
                again.MOVED, first, nudged, second
            )
            for other, actual in zip(others, third, strict=True):
                by_rounding += again.compare_meshes(other.name, first, nudged, actual)
            return by_rounding

        result = compared()
        if not is_of_device and in_any_process(any(not x.is_equal for x in result)):
            # Perhaps rounding was at its work where it seldom is.
            patterns = range(1, 1 + _MORE_NUDGES)
            nudged += [own.measure(rows, own.rounding, pattern) for pattern in patterns]
            result = compared()
        return Made(
            exact + result, first, nudged, third[0] if third else None, rows, is_of_device,
            draw, drawn,
        )

    def notes_not_said(self) -> list[str]:
        """Returns the notes that were added since the last call."""
        new, self._num_said = self.notes[self._num_said :], len(self.notes)
        return new

    def close(self) -> None:
        """Frees the thread; waits for the program that it compiles."""
        self._thread.shutdown(wait=True, cancel_futures=True)


def in_any_process(is_so: bool) -> bool:
    """Returns True, on all processes alike, if it is so in any.

    A device that computes wrongly may tell its own process something else than the others hear.
    """
    return any(processes.exchange("certificate", "yes" if is_so else ""))


