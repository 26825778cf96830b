"""Checkpoints of a TrainState: saved in the background, verified and compared before a restore.

Orbax stores the padded arrays of the mesh that saved; a manifest next to them has the unpadded
shapes. A restore compares those first, then cuts and pads to the shapes of its own mesh.

Of several processes all save and restore; the first one decides which step it is, and writes,
renames and deletes all that Orbax does not.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from praxis_lite.checkpoints.background_save import FailedSave
from praxis_lite.checkpoints.save_checks import check_finite, check_names
from praxis_lite.checkpoints.save_queue import SaveQueue
from praxis_lite.checkpoints.sharded_reading import read_arrays, read_state
from praxis_lite.checkpoints.steps.manifest import (
    check_same,
    digest_of_config,
    manifest_leaf,
    new_manifest,
)
from praxis_lite.checkpoints.steps.save_settings import SaveSettings
from praxis_lite.checkpoints.steps.verified_steps import Metrics, Step, VerifiedSteps
from praxis_lite.checkpoints.stored_arrays import stored_arrays
from praxis_lite.core.errors import ConfigError, did_you_mean
from praxis_lite.core.partitioner.train_state import LeafLayout, StateLayout, TrainState
from praxis_lite.job.local_directory import local_directory
from praxis_lite.job.processes.broadcast import from_first

__all__ = ("Checkpoints", "Restored")

PyTree = Any
# Several may be open in a process; all processes open them in one order.
_numbers = itertools.count()


@dataclasses.dataclass(frozen=True)
class Restored:
    """The result of a restore.

    Attributes:
      step: of the checkpoint.
      state: a TrainState on the mesh.
      data: what was saved with it: the position of the training data.
      from_memory: True if it comes from the memory of hosts and not from the disk.
    """

    step: int
    state: PyTree
    data: Mapping[str, Any]
    from_memory: bool = False


class Checkpoints:
    """The checkpoints of a job; a context that waits for the save in flight on its way out.

    KeyboardInterrupt, that a second signal raises in Python, cancels the save in flight.

    In a custom loop, on any mesh:

        with Checkpoints("folder", saving=SaveSettings()) as checkpoints:
            if checkpoints.latest_step() is None:
                state = partitioner.init(key)
            else:
                state = checkpoints.restore(partitioner.layout, partitioner.mesh).state
            ...
            checkpoints.save(step, state, partitioner.layout)

    A step is used only after all its files were compared with its manifest (`VerifiedSteps`). A
    job that saves renames a damaged step to `N.damaged`, one that only reads skips it; either uses
    the newest whole step in its place.

    Args:
      directory: of all steps.
      saving: how this job saves, or None if it only reads: nothing is then renamed or deleted.
      note: told, a line each, of what is damaged and what is done about it.
      config_json: of the job, for the manifests, or "" if it is not known.
      evaluated: returns metrics by step of evaluations that came after the save, for "best".
      saved: told the newest step whenever it is another, on every process; from any thread.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        saving: SaveSettings | None = None,
        note: Callable[[str], None] = print,
        config_json: str = "",
        evaluated: Callable[[], Metrics] = dict,
        saved: Callable[[int | None], None] = lambda step: None,
    ):
        self.directory, self._saving, self._note = local_directory(directory), saving, note
        self._saved = saved
        self._best = saving and saving.best
        self._steps = VerifiedSteps(
            self.directory, owned=saving is not None, note=note, evaluated=evaluated
        )
        self._config_digest = digest_of_config(config_json) if config_json else ""
        self._name = f"checkpoints {next(_numbers)}"
        self._queue = saving and SaveQueue(self._steps, saving, note, saved, self._name)

    def __enter__(self) -> "Checkpoints":
        if self._saving is not None:
            from_first(self._name, self._steps.repair)
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._queue is None:
            return
        try:
            if isinstance(error, KeyboardInterrupt):
                self._queue.cancel()  # A second signal, in Python: nobody waits for the save.
            self.wait()
        except KeyboardInterrupt:
            self._queue.cancel()
            raise
        except FailedSave as failed:
            if error is None:
                raise
            # The first exception must not be hidden by this one.
            self._note(str(failed))

    def raise_if_failed(self) -> None:
        """Raises FailedSave once the save in the background has failed too often in a row."""
        if self._queue is not None:
            self._queue.raise_if_failed()

    def is_saving(self) -> bool:
        """Returns True while a save runs in the background; from any thread."""
        return self._queue is not None and self._queue.is_saving()

    def retry_is_due(self) -> bool:
        """Returns True if a save that failed is to be tried again now, with the newest state.

        Of several processes never, for their clocks differ: the next save is the next try.
        """
        return self._queue.retry_is_due()

    def wait(self) -> None:
        """Waits for the save in flight; raises FailedSave, for nothing tries again after it."""
        if self._queue is not None:
            self._queue.settle(retries=0)

    def latest_step(self) -> int | None:
        """Returns the newest whole step, after verifying it, or None if there never was a step.

        Raises:
          ConfigError: there are steps, and all are damaged.
        """
        return from_first(self._name, self._steps.newest)

    def all_steps(self) -> list[int]:
        """Returns the committed steps in order, without a step in flight."""
        return self._steps.committed()

    def best_step(self) -> int | None:
        """Returns the best whole step, or None if no checkpoint has the metric."""
        return from_first(self._name, lambda: self._steps.best(self._best))

    def latest_data(self) -> Mapping[str, Any]:
        """Returns the position of the training data that was saved with the newest state."""
        return self._chosen(None)[1]["data"]

    def leaves(self, step: Step = None) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the unpadded shapes of a checkpoint's arrays, by path; reads no array.

        Paths are "mdl_vars/params/softmax/...", "opt_states/slots/...".
        """
        leaves = self._chosen(step)[1]["leaves"]
        return {p: jax.ShapeDtypeStruct(x["shape"], x["dtype"]) for p, x in leaves.items()}

    def save(
        self,
        step: int,
        state: TrainState,
        layout: StateLayout,
        data: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        *,
        is_last: bool = False,
    ) -> None:
        """Saves `state` in the background; it may be donated once this returns.

        Orbax takes everything to the host before it returns. On CPU that is a view of the array's
        own buffer, and XLA gives a step that donates a buffer with a view on it another one. A step
        that is there already is replaced once the new one is whole.

        Args:
          data: saved with the state, such as the position of the training data; as JSON. It is in
            `Restored.data` and `latest_data`.
          metrics: of this very state, such as {"heldout/loss": 1.5}, for `best`.
          is_last: wait until it is saved; what fails is tried again with this very state.

        Raises:
          ConfigError: these Checkpoints only read, numbers in the state are not finite, or two
            leaves have one name; nothing is saved.
          FailedSave: the save before this one failed too often, or this one, if it is the last.
        """
        if self._queue is None:
            raise ConfigError(
                f"Checkpoints({str(self.directory)!r}) only reads. To save, make it with "
                "saving=SaveSettings()."
            )
        self._queue.settle()
        check_names(layout)
        if not self._saving.save_non_finite:
            check_finite(step, state, self._steps.newest_in_words())
        best = self._best and dataclasses.asdict(self._best)
        metrics = {name: float(value) for name, value in (metrics or {}).items()}
        manifest = new_manifest(step, layout, data or {}, metrics, best, self._config_digest)
        self._queue.begin(state, manifest)
        if is_last:
            self._queue.end(state, manifest)

    def abandon_after(self, step: int) -> None:
        """Sets aside the steps after `step`, for a run that is rolled back to it.

        Else the next start would take the newest of them. They are renamed to N.abandoned, and
        deleted once the next save is whole: until then there are no fewer steps than before.
        """
        self._queue.settle()
        from_first(self._name, lambda: self._steps.abandon_after(step))
        self._saved(max((left for left in self.all_steps() if left <= step), default=None))

    def restore(
        self,
        layout: StateLayout,
        mesh: Mesh,
        *,
        step: Step = None,
        opt_states_keys: Sequence[str] | None = None,
    ) -> Restored:
        """Returns a state on `mesh`; it may have been saved on another.

        Args:
          layout: of the whole TrainState.
          step: None for the newest, or "best".
          opt_states_keys: which of the opt_states are compared and read, such as ("ema",); by
            default all.

        Raises:
          ConfigError: there is no such step, or it has other leaves, unpadded shapes or dtypes;
            names them. Or the layout has no such key.
        """
        there = sorted(layout.shapes.opt_states)
        for key in opt_states_keys or ():
            if key not in there:
                raise ConfigError(
                    f"The state to restore has no opt_states[{key!r}]; it has {there}."
                    f"{did_you_mean(key, there)} Set the learner as it was trained."
                )
        step, _ = self._chosen(step)
        step_dir = self.directory / str(step)
        with self._steps.read(step) as manifest:
            state = read_state(
                step_dir, manifest["leaves"], lambda: stored_arrays(step_dir, manifest), layout,
                mesh, opt_states_keys,
            )
        return Restored(step, state, manifest["data"])

    def restore_leaves(
        self, leaves: Mapping[str, LeafLayout], mesh: Mesh, *, step: Step = None
    ) -> dict[str, jax.Array]:
        """Returns arrays of a checkpoint by path, each in its shards; no others are read.

        Args:
          leaves: how each is wanted, by path in the checkpoint.

        Raises:
          ConfigError: there is no such array, or it has another unpadded shape or dtype.
        """
        step, manifest = self._chosen(step)
        expected = {path: manifest_leaf(leaf) for path, leaf in leaves.items()}
        there = {path: leaf for path, leaf in manifest["leaves"].items() if path in expected}
        check_same(self.directory / str(step), there, expected)
        with self._steps.read(step) as manifest:
            return read_arrays(stored_arrays(self.directory / str(step), manifest), leaves, mesh)

    def _chosen(self, step: Step) -> tuple[int, Mapping[str, Any]]:
        """Returns the step that is meant, verified, and its manifest."""
        result = from_first(self._name, lambda: self._steps.choose(step, self._best))
        with self._steps.read(result) as manifest:
            return result, manifest
