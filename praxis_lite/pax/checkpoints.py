"""Reads the variables of a Pax checkpoint on demand.

A step has `checkpoint_00000010/state` and, since version 1.0, `.../metadata/metadata`, a JSON file
which since 1.1 has the unpadded shape of each variable. `state` is one of
- a directory per array, `mdl_vars.params.lm...`, in Zarr 2 (CheckpointType.GDA),
- an OCDBT database with the same arrays (GDA with `tensorstore_use_ocdbt`),
- a msgpack file with a list of arrays (CheckpointType.FLAX, for jobs without a mesh).
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import flax.serialization
import numpy as np

from praxis_lite.checkpoints.stored_arrays import DATABASE, StoredArray, orbax_arrays
from praxis_lite.core.errors import ConfigError
from praxis_lite.host.file_reading import read_json
from praxis_lite.job.local_directory import local_directory

_STEP = re.compile(r"(?:checkpoint_)?(\d+)")
_PREFIX = "mdl_vars."

Shapes = dict[str, tuple[int, ...]]


class PaxCheckpoint(Mapping[str, np.ndarray]):
    """The variables of a step by path, "params/lm/softmax/..."; `[path]` reads an array.

    Arrays have no padding if the checkpoint has their shapes (version 1.1 and later).

    Attributes:
      step: of the checkpoint.

    Raises:
      ConfigError: there are no variables of a Pax model.
    """

    def __init__(self, step: int, directory: Path):
        self.step, self._directory = step, directory
        self._shapes = _shapes(directory)
        state = directory / "state"
        # Version 0.0 has no directory per item.
        state = state if state.is_dir() else directory
        self._arrays: Mapping[str, np.ndarray | StoredArray]
        if (state / "checkpoint").exists() and not (state / DATABASE).exists():
            self._arrays = _msgpack_arrays(state / "checkpoint", self._shapes)
        else:
            self._arrays = orbax_arrays(state, _PREFIX)
        if not self._arrays:
            raise ConfigError(
                f"{directory} has no variables of a Pax model ({_PREFIX}*). Name the "
                "`checkpoints` directory of a Pax job, or one of its steps."
            )

    def shape_of(self, path: str) -> tuple[int, ...]:
        """Returns the shape of `[path]` without reading it."""
        return self._shapes.get(path, tuple(self._arrays[path].shape))

    def __getitem__(self, path: str) -> np.ndarray:
        """Raises: ConfigError: the padding is not zero."""
        array = self._arrays[path]
        if isinstance(array, StoredArray):
            array = array.read()
        unpadded = array[tuple(map(slice, self.shape_of(path)))]
        if np.count_nonzero(unpadded) != np.count_nonzero(array):
            raise ConfigError(
                f"{path} in {self._directory} has shape {array.shape}, and {unpadded.shape} in its "
                "metadata, but the padding is not zero. The checkpoint is damaged."
            )
        return unpadded

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def read_pax_checkpoint(directory: str | Path, step: int | None = None) -> PaxCheckpoint:
    """Returns a checkpoint's variables by path, without the optimizer's slots.

    Args:
      directory: a job_log_dir of Pax, its `checkpoints`, or one step in there; a local path.
      step: its number, or None for the newest.

    Raises:
      ConfigError: there is no such checkpoint, or Pax did not write it.
    """
    directory = local_directory(directory)
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory. Name a Pax job's checkpoints.")
    if (directory / "state").is_dir() and (match := _STEP.fullmatch(directory.name)):
        steps = {int(match[1]): directory}
    else:
        inner = directory / "checkpoints"
        directory = inner if inner.is_dir() else directory
        steps = {
            int(match[1]): path
            for path in directory.iterdir()
            # Unfinished saves have longer names.
            if path.is_dir() and (match := _STEP.fullmatch(path.name))
        }
    if not steps or (step is not None and step not in steps):
        missing = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        numbers = ", ".join(map(str, sorted(steps))) or "none"
        raise ConfigError(
            f"{directory} has {missing}; its steps are: {numbers}. Name a Pax job's `checkpoints` "
            "directory and one of its steps."
        )
    newest = max(steps) if step is None else step
    return PaxCheckpoint(newest, steps[newest])


def _shapes(directory: Path) -> Shapes:
    """Returns the unpadded shapes by path; {} for versions before 1.1, which lack them."""
    file = directory / "metadata" / "metadata"
    if not file.exists():
        return {}
    shapes: Shapes = {}

    def add(path: str, node: Mapping[str, Any]) -> None:
        if not node.get("_array_metadata_tag"):
            # Sorted like JAX's trees, because a msgpack checkpoint lists its arrays in this order.
            for key in sorted(node):
                add(f"{path}/{key}" if path else key, node[key])
        elif "unpadded_shape" in node:
            shapes[path] = tuple(node["unpadded_shape"])

    add("", read_json(file).get("train_state_metadata", {}).get("mdl_vars", {}))
    return shapes


def _msgpack_arrays(file: Path, shapes: Shapes) -> dict[str, np.ndarray]:
    if not shapes:
        raise ConfigError(
            f"{file} lists arrays without their names, and there is no metadata of version 1.1 or "
            "later next to it. Restore the job with Pax, and save it with CheckpointType.GDA."
        )
    arrays = flax.serialization.msgpack_restore(file.read_bytes())["flattened_state"]
    arrays = list(arrays.values() if isinstance(arrays, Mapping) else arrays)
    # A train state is (step, mdl_vars, opt_states, ...).
    return dict(zip(shapes, arrays[1:], strict=False))
