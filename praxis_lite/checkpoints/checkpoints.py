"""Checkpoints of a TrainState, saved in the background and verified before they are restored.

Arrays are stored with padding for the mesh on which they are saved. A manifest contains their
logical shapes. On restore, the logical shapes are checked against the model, and the arrays are
then padded for the model's mesh.

If there are several processes, each process saves and restores its shards. The first process
chooses the step, and writes, renames and deletes all files except the files of arrays.
"""

import dataclasses
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

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
from praxis_lite.core.errors import ConfigError, FailedSave, did_you_mean
from praxis_lite.core.partitioner.train_state import LeafLayout, StateLayout, TrainState
from praxis_lite.host.object_stores import AnyPath
from praxis_lite.job.local_directory import directory as directory_at
from praxis_lite.job.processes.broadcast import from_first

__all__ = ("Checkpoints", "Restored")

_log = logging.getLogger(__name__)

PyTree = Any
# Numbers the instances in a process. All processes must create instances in the same order.
_numbers = itertools.count()


@dataclasses.dataclass(frozen=True)
class Restored:
    """A restored state.

    Attributes:
      step: The step of the checkpoint.
      state: The TrainState on the mesh.
      data: The JSON data that was saved with the state, such as the position in the training data.
      from_memory: Whether the state was restored from the memory of hosts instead of the disk.
    """

    step: int
    state: PyTree
    data: Mapping[str, Any]
    from_memory: bool = False


class Checkpoints:
    """The checkpoints of a job. As a context manager, waits for the save in progress on exit.

    A KeyboardInterrupt, raised by a second Ctrl-C, cancels the save in progress.

    Usage in a custom loop, on any mesh:

        with Checkpoints("folder", saving=SaveSettings()) as checkpoints:
            if checkpoints.latest_step() is None:
                state = partitioner.init(key)
            else:
                state = checkpoints.restore(partitioner.layout, partitioner.mesh).state
            ...
            checkpoints.save(step, state, partitioner.layout)

    A step is verified before it is used, by comparing all its files with its manifest
    (`VerifiedSteps`). A job that saves sets damaged steps aside, and a job that only reads skips
    them. Both then use the newest undamaged step.

    Args:
      directory: The folder of all steps.
      saving: Settings for saving, or None for reading only, without renaming or deleting anything.
      note: Called with a message about each damaged step and how it is handled.
      config_json: Content of the job's config.json, whose digest is stored in the manifests; "" if
        unknown.
      evaluated: Function that returns metrics keyed by step, from evaluations run after the save.
        These metrics are used to find the best step.
      saved: Called with the newest step when it changes, in every process and from any thread.
      before_commit: Called in every process before its arrays are complete, and in the first
        process again before the commit, from any thread. If it raises, the save fails.
    """

    def __init__(
        self,
        directory: str | AnyPath,
        *,
        saving: SaveSettings | None = None,
        note: Callable[[str], None] = _log.warning,
        config_json: str = "",
        evaluated: Callable[[], Metrics] = dict,
        saved: Callable[[int | None], None] = lambda step: None,
        before_commit: Callable[[], None] = lambda: None,
    ):
        self.directory, self._saving, self._note = directory_at(directory), saving, note
        self._saved = saved
        self._best = None if saving is None else saving.best
        self._steps = VerifiedSteps(
            self.directory, owned=saving is not None, note=note, evaluated=evaluated
        )
        self._config_digest = digest_of_config(config_json) if config_json else ""
        self._name = f"checkpoints {next(_numbers)}"
        self._queue = (
            None
            if saving is None
            else SaveQueue(self._steps, saving, note, saved, before_commit, self._name)
        )

    def __enter__(self) -> "Checkpoints":
        if self._saving is not None:
            from_first(self._name, self._steps.repair)
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._queue is None:
            return
        try:
            if isinstance(error, KeyboardInterrupt):
                self._queue.cancel()  # After a second Ctrl-C, the user does not want to wait.
            self.wait()
        except KeyboardInterrupt:
            self._queue.cancel()
            raise
        except FailedSave as failed:
            if error is None:
                raise
            # Do not replace the exception that is being raised.
            self._note(str(failed))

    def raise_if_failed(self) -> None:
        """Raises FailedSave if too many consecutive saves have failed."""
        if self._queue is not None:
            self._queue.raise_if_failed()

    def is_saving(self) -> bool:
        """Returns whether a save is in progress. May be called from any thread."""
        return self._queue is not None and self._queue.is_saving()

    def retry_is_due(self) -> bool:
        """Returns whether to retry a failed save now, with the newest state.

        If there are several processes, this always returns False, because their clocks differ. In
        that case, the next regular save replaces the retry.
        """
        assert self._queue is not None, "Only a job that saves retries."
        return self._queue.retry_is_due()

    def wait(self) -> None:
        """Waits for the save in progress. Raises FailedSave, without a retry, if the save fails."""
        if self._queue is not None:
            self._queue.settle(retries=0)

    def latest_step(self) -> int | None:
        """Verifies and returns the newest step, or None if no step was saved.

        Raises:
          ConfigError: All steps are damaged.
        """
        return from_first(self._name, self._steps.newest)

    def all_steps(self) -> list[int]:
        """Returns the committed steps in order, without a step that is being saved."""
        return self._steps.committed()

    def best_step(self) -> int | None:
        """Verifies and returns the best step, or None if no checkpoint has the metric."""
        return from_first(self._name, lambda: self._steps.best(self._best))

    def latest_data(self) -> Mapping[str, Any]:
        """Returns the JSON data saved with the newest state, such as the data position."""
        return self._steps.manifest(self._choose(None))["data"]

    def leaves(self, step: Step = None) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the logical shapes and dtypes of a checkpoint's arrays, without reading them.

        Args:
          step: The step, "best", or None for the newest step.

        Returns:
          Shapes keyed by path, such as "mdl_vars/params/softmax/..." or "opt_states/slots/...".
        """
        leaves = self._steps.manifest(self._choose(step))["leaves"]
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
        """Saves `state` in the background. The state may be donated after this returns.

        The state is copied to the host before this method returns. On CPU, the copy is a view of
        the array's buffer, and XLA does not reuse a donated buffer while a view exists. An existing
        checkpoint of the same step is replaced after the new checkpoint is complete; in an object
        store, it is deleted first.

        Args:
          step: The step of the state.
          state: The state.
          layout: Layout of the state.
          data: JSON data to save with the state, such as the position in the training data. The
            data is returned in `Restored.data` and by `latest_data`.
          metrics: Metrics of this state, such as {"heldout/loss": 1.5}, to find the best step.
          is_last: Whether to wait until the state is saved, and to retry a failed save with the
            same state.

        Raises:
          ConfigError: Nothing is saved, because this object is read-only, the state contains
            numbers that are not finite, or two leaves have the same name.
          FailedSave: Too many earlier saves failed, or `is_last` is True and this save failed.
        """
        if self._queue is None or self._saving is None:
            raise ConfigError(
                f"Checkpoints({str(self.directory)!r}) is read-only. To save, pass "
                "saving=SaveSettings()."
            )
        self._queue.settle()
        check_names(layout)
        if not self._saving.save_non_finite:
            check_finite(step, state, self._steps.describe_newest())
        best = None if self._best is None else dataclasses.asdict(self._best)
        metrics = {name: float(value) for name, value in (metrics or {}).items()}
        manifest = new_manifest(step, layout, data or {}, metrics, best, self._config_digest)
        self._queue.begin(state, manifest)
        if is_last:
            self._queue.end(state, manifest)

    def abandon_after(self, step: int) -> None:
        """Sets aside the steps after `step` when a run is rolled back to `step`.

        Otherwise, the next launch would resume from the newest of these steps. The steps are
        renamed to N.abandoned, and deleted after the next save is complete; in an object store,
        they are deleted now.
        """
        assert self._queue is not None, "Only a job that saves is rolled back."
        self._queue.settle()
        from_first(self._name, lambda: self._steps.abandon_after(step))
        self._saved(max((other for other in self.all_steps() if other <= step), default=None))

    def restore(
        self,
        layout: StateLayout,
        mesh: Mesh,
        *,
        step: Step = None,
        opt_states_keys: Sequence[str] | None = None,
    ) -> Restored:
        """Restores a state on `mesh`, which may differ from the mesh on which it was saved.

        Args:
          layout: Layout of the complete TrainState.
          mesh: The mesh.
          step: The step, "best", or None for the newest step.
          opt_states_keys: Keys of the opt_states to check and read, such as ("ema",), or None for
            all.

        Returns:
          The restored state, and the data that was saved with it.

        Raises:
          ConfigError: The step does not exist; its leaves, logical shapes or dtypes differ from the
            layout; or the layout's opt_states do not contain one of the keys.
        """
        existing = sorted(layout.shapes.opt_states)
        for key in opt_states_keys or ():
            if key not in existing:
                raise ConfigError(
                    f"The state to restore has no opt_states[{key!r}]; it has {existing}."
                    f"{did_you_mean(key, existing)} Use the learner that the job was trained with."
                )
        step = self._choose(step)
        step_dir = self.directory / str(step)
        with self._steps.read(step) as manifest:
            state = read_state(
                step_dir,
                manifest["leaves"],
                lambda: stored_arrays(step_dir, manifest),
                layout,
                mesh,
                opt_states_keys,
            )
        return Restored(step, state, manifest["data"])

    def restore_leaves(
        self, leaves: Mapping[str, LeafLayout], mesh: Mesh, *, step: Step = None
    ) -> dict[str, jax.Array]:
        """Restores some arrays from a checkpoint into their shards.

        Args:
          leaves: The layout of each array to read, keyed by its path in the checkpoint.
          mesh: The mesh.
          step: The step, "best", or None for the newest step.

        Returns:
          The arrays, keyed by path.

        Raises:
          ConfigError: An array does not exist, or its logical shape or dtype differs.
        """
        step = self._choose(step)
        step_dir = self.directory / str(step)
        with self._steps.read(step) as manifest:
            expected = {path: manifest_leaf(leaf) for path, leaf in leaves.items()}
            saved = {path: leaf for path, leaf in manifest["leaves"].items() if path in expected}
            check_same(step_dir, saved, expected)
            return read_arrays(stored_arrays(step_dir, manifest), leaves, mesh)

    def _choose(self, step: Step) -> int:
        """Returns the number of the step to restore, after verifying it."""
        return from_first(self._name, lambda: self._steps.choose(step, self._best))
