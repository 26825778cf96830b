"""Checkpoints of a TrainState: saved asynchronously by Orbax, compared before a restore.

What Orbax stores are the padded arrays of the mesh that saved; a manifest beside them has the true
shapes. A restore compares those first. Only then may Orbax cut and pad to the shapes of another
mesh: by itself it would also cut a real mismatch, without a word.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from praxis_lite.checkpoints.best_checkpoints import BestCheckpoints, KeepBest
from praxis_lite.checkpoints.manifest import Leaves, differences, manifest_leaf, manifest_leaves
from praxis_lite.checkpoints.save_settings import SaveSettings
from praxis_lite.errors import ConfigError, did_you_mean
from praxis_lite.train_state import LeafLayout, StateLayout, TrainState

PyTree = Any
Step = int | Literal["best"] | None  # None: the newest.
_policies = ocp.checkpoint_managers


@dataclasses.dataclass(frozen=True)
class Restored:
    """What a checkpoint gives back.

    Attributes:
      step: of the checkpoint.
      state: a TrainState on the mesh.
      data: what was saved beside it: the position of the training data.
    """

    step: int
    state: PyTree
    data: Mapping[str, Any]


class Checkpoints:
    """The checkpoints of one job; a context that waits for the save in flight on its way out.

    Args:
      directory: of all steps.
      saving: how this job saves. None: it reads only, and nothing is ever renamed or deleted.
      note: told, a line each, of what is damaged and what is done about it.
    """

    def __init__(
        self,
        directory: Path,
        *,
        saving: SaveSettings | None = None,
        note: Callable[[str], None] = print,
    ):
        best = saving.best if saving else None
        max_to_keep = saving.max_to_keep if saving else None
        self.directory, self._best = directory, best
        self._metrics: dict[int, dict[str, float]] = {}
        kept = [_policies.LatestN(max_to_keep)]
        if best is not None:
            kept.append(KeepBest(best, self._metrics))
        self._manager = ocp.CheckpointManager(
            directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=_policies.AnyPreservationPolicy(kept),
                create=max_to_keep is not None,
            ),
            item_handlers={
                "mdl_vars": ocp.PyTreeCheckpointHandler(),
                "opt_states": ocp.PyTreeCheckpointHandler(),
                "manifest": ocp.JsonCheckpointHandler(),
            },
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._manager.wait_until_finished()
        self._manager.close()

    def raise_if_failed(self) -> None:
        """Raises what made the save in the background fail, once."""
        self._manager.check_for_errors()

    def wait(self) -> None:
        """Waits for the save in flight; raises what made it fail."""
        self._manager.wait_until_finished()

    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    def all_steps(self) -> list[int]:
        return sorted(self._manager.all_steps())

    def best_step(self) -> int | None:
        """Returns the best step there is; None where no checkpoint has the metric."""
        if self.latest_step() is None:
            return None
        best = self._best
        if best is None:
            recorded = self._manifest(None)[1].get("best")
            if recorded is None:
                return None
            best = BestCheckpoints(**recorded)
        self._read_metrics()
        ranked = best.ranked({step: self._metrics[step] for step in self.all_steps()})
        return ranked[0] if ranked else None

    def latest_data(self) -> Mapping[str, Any]:
        """Returns what was saved beside the newest state: the position of the training data."""
        return self._manifest(None)[1]["data"]

    def leaves(self, step: Step = None) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the true shapes of what a checkpoint has, by path; reads no array.

        Paths are "mdl_vars/params/softmax/...", "opt_states/slots/...".
        """
        leaves = self._manifest(step)[1]["leaves"]
        return {p: jax.ShapeDtypeStruct(x["shape"], x["dtype"]) for p, x in leaves.items()}

    def save(
        self,
        step: int,
        state: TrainState,
        layout: StateLayout,
        data: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Saves `state` in the background; it may be donated as soon as this returns.

        Orbax takes everything to the host before it returns. On CPU that is a view of the array's
        own buffer, and XLA gives a step that donates a buffer with a view on it another one.

        Args:
          data: what `latest_data` gives back.
          metrics: of this very state, such as {"heldout/loss": 1.5}, for `best`.
        """
        metrics = {name: float(value) for name, value in (metrics or {}).items()}
        manifest = {
            "step": step, "data": dict(data), "metrics": metrics,
            "best": self._best and dataclasses.asdict(self._best),
            "leaves": manifest_leaves(layout),
        }
        if self._best is not None:
            self._read_metrics()
        self._metrics[step] = metrics
        saved = self._manager.save(
            step,
            args=ocp.args.Composite(
                mdl_vars=ocp.args.PyTreeSave(state.mdl_vars),
                opt_states=ocp.args.PyTreeSave(state.opt_states),
                manifest=ocp.args.JsonSave(manifest),
            ),
        )
        if not saved:
            raise RuntimeError(
                f"Orbax did not save step {step} in {self.directory}: it holds the steps "
                f"{self.all_steps()}."
            )

    def restore(self, layout: StateLayout, mesh: Mesh, *, step: Step = None) -> Restored:
        """Returns a state on `mesh`, whatever mesh saved it.

        Args:
          step: None: the newest; "best".

        Raises:
          ConfigError: there is none, or it has other leaves, true shapes or dtypes; names them.
        """
        return self._restore(layout, mesh, None, step)

    def restore_for_eval(
        self,
        layout: StateLayout,
        mesh: Mesh,
        opt_states_keys: Sequence[str] = (),
        *,
        step: Step = None,
    ) -> Restored:
        """Returns a TrainState with the weights, and of its opt_states what is named, no more.

        The rest is neither compared nor read.

        Args:
          layout: of the whole TrainState.
          opt_states_keys: such as ("ema",).

        Raises:
          ConfigError: as `restore`, for what is restored; or the layout has no such key.
        """
        for key in opt_states_keys:
            if key not in layout.shapes.opt_states:
                there = sorted(layout.shapes.opt_states)
                raise ConfigError(
                    f"The state to restore has no opt_states[{key!r}]; it has {there}."
                    f"{did_you_mean(key, there)} Set the learner as it was trained."
                )
        return self._restore(layout, mesh, tuple(opt_states_keys), step)

    def restore_leaves(
        self, leaves: Mapping[str, LeafLayout], mesh: Mesh, *, step: Step = None
    ) -> dict[str, jax.Array]:
        """Returns arrays of a checkpoint by path, each in its shards; no others are read.

        Args:
          leaves: by path in the checkpoint, how each is wanted: true and padded shape, dtype, spec.

        Raises:
          ConfigError: no such array, or of another true shape or dtype.
        """
        step, manifest = self._manifest(step)
        wanted = {path: manifest_leaf(leaf) for path, leaf in leaves.items()}
        there = {path: leaf for path, leaf in manifest["leaves"].items() if path in wanted}
        self._compare(step, there, wanted)
        return self._read(step, leaves, mesh)

    def _restore(
        self, layout: StateLayout, mesh: Mesh, opt_states_keys: Sequence[str] | None, step: Step
    ) -> Restored:
        step, manifest = self._manifest(step)
        saved = manifest["leaves"]
        if opt_states_keys is not None:
            kept = ("mdl_vars/", *(f"opt_states/{key}/" for key in opt_states_keys))
            saved = {path: leaf for path, leaf in saved.items() if f"{path}/".startswith(kept)}
        part = _part(layout, opt_states_keys)
        self._compare(step, saved, manifest_leaves(part))
        arrays = self._read(step, {leaf.path: leaf for leaf in part.leaves()}, mesh)
        tree = jax.tree.unflatten(jax.tree.structure(part.shapes), arrays.values())
        step_array = jax.device_put(np.int32(step), NamedSharding(mesh, PartitionSpec()))
        state = TrainState(step_array, tree["mdl_vars"], tree["opt_states"])
        return Restored(step, state, manifest["data"])

    def _read(self, step: int, leaves: Mapping[str, LeafLayout], mesh: Mesh) -> dict[str, Any]:
        """Returns the padded arrays in the order of `leaves`, which have been compared."""
        wanted = {
            path: ocp.ArrayRestoreArgs(
                sharding=NamedSharding(mesh, leaf.spec), global_shape=leaf.padded_shape,
                dtype=leaf.dtype, strict=False,
            )
            for path, leaf in leaves.items()
        }
        stored, args = self._manager.item_metadata(step), {}
        for item in {path.partition("/")[0] for path in leaves}:
            # The tree as it is stored, so that the item need not be wanted as a whole.
            restore_args = jax.tree_util.tree_map_with_path(
                lambda path, _, item=item: wanted.get(_joined(item, path), ocp.PLACEHOLDER),
                stored[item].tree,
            )
            args[item] = ocp.args.PyTreeRestore(restore_args, restore_args=restore_args)
        restored = self._manager.restore(step, args=ocp.args.Composite(**args))
        found = {
            _joined(item, path): x
            for item in args
            for path, x in jax.tree_util.tree_flatten_with_path(restored[item])[0]
        }
        return {path: found[path] for path in leaves}

    def _read_metrics(self) -> None:
        for step in self.all_steps():
            # What this process saved is known, and may still be in flight.
            if step not in self._metrics:
                self._metrics[step] = self._manifest(step)[1].get("metrics", {})

    def _manifest(self, step: Step) -> tuple[int, dict[str, Any]]:
        steps = self.all_steps()
        if not steps:
            raise ConfigError(
                f"There is no checkpoint in {self.directory}. Train first with --mode=train, or "
                "name the directory of a job that was trained."
            )
        found = steps[-1] if step is None else self.best_step() if step == "best" else step
        if found not in steps:
            what = f"no checkpoint of step {step}"
            if step == "best":
                what = "no best checkpoint, for none was saved with the metric to judge it by,"
            raise ConfigError(
                f"There is {what} in {self.directory}; it has the steps "
                f"{', '.join(map(str, steps))}. Name one of them, or None for the newest."
            )
        args = ocp.args.Composite(manifest=ocp.args.JsonRestore())
        return found, self._manager.restore(found, args=args)["manifest"]

    def _compare(self, step: int, saved: Leaves, wanted: Leaves) -> None:
        found = differences(saved, wanted)
        if found:
            more = f"; and {len(found) - 5} more" if len(found) > 5 else ""
            raise ConfigError(
                f"The checkpoint of step {step} in {self.directory} is of another model: "
                f"{'; '.join(found[:5])}{more}. Use the settings that it was trained with (see "
                "config.txt beside it), or start a new job in another job_log_dir."
            )


def _part(layout: StateLayout, opt_states_keys: Sequence[str] | None) -> StateLayout:
    """Returns the layout of `{"mdl_vars": ..., "opt_states": ...}`; None: with all opt_states."""

    def part(state: TrainState) -> dict[str, PyTree]:
        keys = state.opt_states if opt_states_keys is None else opt_states_keys
        return {
            "mdl_vars": state.mdl_vars, "opt_states": {key: state.opt_states[key] for key in keys}
        }

    return StateLayout(part(layout.shapes), part(layout.specs), layout.axis_sizes)


def _joined(item: str, path: tuple) -> str:
    return f"{item}/{jax.tree_util.keystr(path, simple=True, separator='/')}"
