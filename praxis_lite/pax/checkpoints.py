"""Reads the variables of a Pax checkpoint. Each array is read when it is accessed.

A checkpoint contains `checkpoint_00000010/state` and, since version 1.0, the JSON file
`checkpoint_00000010/metadata/metadata`. Since version 1.1, this file contains the unpadded shape of
each variable. `state` has one of three formats:
- a Zarr 2 directory per array, `mdl_vars.params.lm...` (CheckpointType.GDA),
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
from praxis_lite.host.object_stores import AnyPath
from praxis_lite.job.local_directory import directory as directory_at

_STEP = re.compile(r"(?:checkpoint_)?(\d+)")
_PREFIX = "mdl_vars."

Shapes = dict[str, tuple[int, ...]]


class PaxCheckpoint(Mapping[str, np.ndarray]):
    """Maps paths such as "params/lm/softmax/..." to arrays, which are read on access.

    Padding is removed if the checkpoint contains the unpadded shapes (version 1.1 and later).

    Args:
      step: Step of the checkpoint.
      directory: Directory of this step.

    Attributes:
      step: Step of the checkpoint.

    Raises:
      ConfigError: The directory contains no Pax model variables.
    """

    def __init__(self, step: int, directory: AnyPath):
        self.step, self._directory = step, directory
        self._shapes = _shapes(directory)
        state = directory / "state"
        # In version 0.0, the arrays are in the step's directory itself.
        state = state if state.is_dir() else directory
        self._arrays: Mapping[str, np.ndarray | StoredArray]
        if (state / "checkpoint").exists() and not (state / DATABASE).exists():
            self._arrays = _msgpack_arrays(state / "checkpoint", self._shapes)
        else:
            self._arrays = orbax_arrays(state, _PREFIX)
        if not self._arrays:
            raise ConfigError(
                f"{directory} contains no Pax model variables ({_PREFIX}*). Specify the "
                "`checkpoints` directory of a Pax job, or one of its steps."
            )

    def shape_of(self, path: str) -> tuple[int, ...]:
        """Returns the unpadded shape of a variable without reading it."""
        return self._shapes.get(path, tuple(self._arrays[path].shape))

    def __getitem__(self, path: str) -> np.ndarray:
        """Reads a variable and removes its padding.

        Raises:
          ConfigError: The padding contains values other than zero.
        """
        array = self._arrays[path]
        if isinstance(array, StoredArray):
            array = array.read()
        unpadded = array[tuple(map(slice, self.shape_of(path)))]
        if np.count_nonzero(unpadded) != np.count_nonzero(array):
            raise ConfigError(
                f"{path} in {self._directory} has the shape {array.shape} and the unpadded shape "
                f"{unpadded.shape}, but its padding is not zero. The checkpoint is damaged."
            )
        return unpadded

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def read_pax_checkpoint(directory: str | Path, step: int | None = None) -> PaxCheckpoint:
    """Opens a Pax checkpoint. Returns its model variables (without slots), keyed by path.

    Args:
      directory: Path or URL of a Pax job_log_dir, of its `checkpoints` directory, or of a step.
      step: Step to read, or None for the latest.

    Raises:
      ConfigError: There is no such checkpoint, or it was not written by Pax.
    """
    found = directory_at(directory)
    if not found.is_dir():
        raise ConfigError(
            f"{found} is not a directory. Specify the `checkpoints` directory of a Pax job."
        )
    if (found / "state").is_dir() and (match := _STEP.fullmatch(found.name)):
        steps = {int(match[1]): found}
    else:
        inner = found / "checkpoints"
        found = inner if inner.is_dir() else found
        steps = {
            int(match[1]): path
            for path in found.iterdir()
            # Skip unfinished saves, which have longer names.
            if path.is_dir() and (match := _STEP.fullmatch(path.name))
        }
    if not steps or (step is not None and step not in steps):
        missing = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        available = ", ".join(map(str, sorted(steps))) or "none"
        raise ConfigError(
            f"{found} has {missing}; available steps: {available}. Specify the `checkpoints` "
            "directory of a Pax job and one of its steps."
        )
    step = max(steps) if step is None else step
    return PaxCheckpoint(step, steps[step])


def _shapes(directory: AnyPath) -> Shapes:
    """Returns the unpadded shapes, keyed by path, or {} for versions before 1.1."""
    file = directory / "metadata" / "metadata"
    if not file.exists():
        return {}
    shapes: Shapes = {}

    def add(path: str, node: Mapping[str, Any]) -> None:
        if not node.get("_array_metadata_tag"):
            # Sort as JAX flattens dicts: msgpack checkpoints list their arrays in this order.
            for key in sorted(node):
                add(f"{path}/{key}" if path else key, node[key])
        elif "unpadded_shape" in node:
            shapes[path] = tuple(node["unpadded_shape"])

    add("", read_json(file).get("train_state_metadata", {}).get("mdl_vars", {}))
    return shapes


def _msgpack_arrays(file: AnyPath, shapes: Shapes) -> dict[str, np.ndarray]:
    """Reads the arrays in a msgpack file. The keys of `shapes` are their paths."""
    if not shapes:
        raise ConfigError(
            f"The arrays in {file} have no names, and there is no metadata (version 1.1 or later) "
            "that lists them. Restore the job with Pax, and save it with CheckpointType.GDA."
        )
    arrays = flax.serialization.msgpack_restore(file.read_bytes())["flattened_state"]
    arrays = list(arrays.values() if isinstance(arrays, Mapping) else arrays)
    # A train state is (step, mdl_vars, opt_states, ...).
    return dict(zip(shapes, arrays[1:], strict=False))
