"""Checkpoints of a TrainState: saved asynchronously by Orbax, compared before a restore.

What Orbax stores are the padded arrays of the mesh that saved; a manifest beside them has the true
shapes. A restore compares those first. Only then may Orbax cut and pad to the shapes of another
mesh: by itself it would also cut a real mismatch, without a word.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from praxis_lite.errors import ConfigError
from praxis_lite.train_state import StateLayout, TrainState

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Restored:
    """What a checkpoint gives back.

    Attributes:
      step: of the checkpoint.
      state: a TrainState on the mesh, or its mdl_vars alone.
    """

    step: int
    state: PyTree


class Checkpoints:
    """The checkpoints of one job; a context that waits for the save in flight on its way out.

    Args:
      directory: of all steps.
      max_to_keep: older steps are deleted; None: nothing is ever deleted (reading).
    """

    def __init__(self, directory: Path, *, max_to_keep: int | None = None):
        self._directory = directory
        self._manager = ocp.CheckpointManager(
            directory,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=max_to_keep, create=max_to_keep is not None
            ),
            item_names=("mdl_vars", "opt_states", "manifest"),
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._manager.wait_until_finished()
        self._manager.close()

    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    def all_steps(self) -> list[int]:
        return sorted(self._manager.all_steps())

    def latest_data(self) -> Mapping[str, Any]:
        """Returns what was saved beside the newest state: the position of the training data."""
        return self._manifest()[1]["data"]

    def save(self, step: int, state: TrainState, layout: StateLayout, data: Mapping) -> None:
        """Saves `state` in the background; it may be donated as soon as this returns.

        Orbax takes everything to the host before it returns. On CPU that is a view of the array's
        own buffer, and XLA gives a step that donates a buffer with a view on it another one.
        """
        manifest = {"step": step, "data": dict(data), "leaves": dict(_manifest_leaves(layout))}
        saved = self._manager.save(
            step,
            args=ocp.args.Composite(
                mdl_vars=ocp.args.StandardSave(state.mdl_vars),
                opt_states=ocp.args.StandardSave(state.opt_states),
                manifest=ocp.args.JsonSave(manifest),
            ),
        )
        if not saved:
            raise RuntimeError(
                f"Orbax did not save step {step} in {self._directory}: it holds the steps "
                f"{self.all_steps()}."
            )

    def restore(self, layout: StateLayout, mesh: Mesh) -> Restored:
        """Returns the newest state on `mesh`, whatever mesh saved it.

        Raises:
          ConfigError: there is none, or it has other leaves, true shapes or dtypes; names them.
        """
        step, manifest = self._manifest()
        self._compare(step, manifest["leaves"], layout)
        abstract = layout.abstract(mesh)
        items = self._manager.restore(
            step,
            args=ocp.args.Composite(
                mdl_vars=ocp.args.StandardRestore(abstract.mdl_vars, strict=False),
                opt_states=ocp.args.StandardRestore(abstract.opt_states, strict=False),
            ),
        )
        step_array = jax.device_put(np.int32(step), abstract.step.sharding)
        state = TrainState(step_array, items["mdl_vars"], items["opt_states"])
        return Restored(step, state)

    def restore_mdl_vars(self, layout: StateLayout, mesh: Mesh) -> Restored:
        """Returns the newest weights on `mesh`; optimizer slots are not read.

        Args:
          layout: of the whole TrainState.

        Raises:
          ConfigError: as `restore`, for the weights.
        """
        step, manifest = self._manifest()
        leaves = {p: x for p, x in manifest["leaves"].items() if p.startswith("mdl_vars/")}
        self._compare(step, leaves, layout, only="mdl_vars/")
        abstract = layout.select("mdl_vars").abstract(mesh)
        items = self._manager.restore(
            step,
            args=ocp.args.Composite(
                mdl_vars=ocp.args.StandardRestore(abstract, strict=False),
            ),
        )
        return Restored(step, items["mdl_vars"])

    def _manifest(self) -> tuple[int, dict[str, Any]]:
        step = self._manager.latest_step()
        if step is None:
            raise ConfigError(
                f"There is no checkpoint in {self._directory}. Train first with --mode=train, or "
                "name the directory of a job that was trained."
            )
        args = ocp.args.Composite(manifest=ocp.args.JsonRestore())
        return step, self._manager.restore(step, args=args)["manifest"]

    def _compare(
        self, step: int, saved: Mapping[str, Any], layout: StateLayout, only: str = ""
    ) -> None:
        wanted = {p: leaf for p, leaf in _manifest_leaves(layout) if p.startswith(only)}
        found = []
        # Sorted, the weights (mdl_vars) stand before their slots (opt_states).
        for path in sorted(saved.keys() | wanted.keys()):
            if path not in wanted:
                found.append(f"{path} is only in the checkpoint")
            elif path not in saved:
                found.append(f"{path} is only in the model")
            else:
                for what in ("shape", "dtype"):
                    old, new = saved[path][what], wanted[path][what]
                    if old != new:
                        found.append(
                            f"{path} has {what} {old} in the checkpoint, {new} in the model"
                        )
        if found:
            more = f"; and {len(found) - 5} more" if len(found) > 5 else ""
            raise ConfigError(
                f"The checkpoint of step {step} in {self._directory} is of another model: "
                f"{'; '.join(found[:5])}{more}. Use the settings that it was trained with (see "
                "config.txt beside it), or start a new job in another job_log_dir."
            )


def _manifest_leaves(layout: StateLayout) -> Iterator[tuple[str, dict[str, Any]]]:
    for leaf in layout.leaves():
        if leaf.path == "step":
            continue
        yield leaf.path, {
            "shape": list(leaf.shape),
            "padded_shape": list(leaf.padded_shape),
            "dtype": str(leaf.dtype),
            "spec": [list(e) if isinstance(e, tuple) else e for e in leaf.spec],
        }
