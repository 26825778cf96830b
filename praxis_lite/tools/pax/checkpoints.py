"""The variables in a checkpoint directory that Pax wrote, each read when it is asked for.

Of one step there lie `checkpoint_00000010/state` and, since version 1.0, `.../metadata/metadata`,
JSON that has since 1.1 the shape of each variable before it was padded. `state` is, by the job's
settings,
- a directory per array, `mdl_vars.params.lm...`, in Zarr 2 (CheckpointType.GDA),
- one OCDBT database with the same arrays (GDA with `tensorstore_use_ocdbt`), or
- a msgpack file with a list of arrays (CheckpointType.FLAX, of jobs without a mesh).
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import flax.serialization
import numpy as np

from praxis_lite.core.errors import ConfigError, shown
from praxis_lite.host.host_memory import available_bytes
from praxis_lite.run.checkpoints.files.ocdbt import DATABASE
from praxis_lite.run.checkpoints.files.origin import Origin
from praxis_lite.run.checkpoints.files.step_names import regular_files
from praxis_lite.run.checkpoints.files.stored_arrays import StoredArray
from praxis_lite.run.checkpoints.files.untrusted_json import is_shape, read_object
from praxis_lite.run.job.local_directory import local_directory
from praxis_lite.tools.foreign_checkpoints.arrays import foreign_arrays

_STEP = re.compile(r"(?:checkpoint_)?(\d+)")
_PREFIX = "mdl_vars."
_ADVICE = "It is damaged, or Pax did not write it: use another step, or another copy of this one."

Shapes = dict[str, tuple[int, ...]]


class PaxCheckpoint(Mapping[str, np.ndarray]):
    """The variables of a step by path, "params/lm/softmax/..."; reading a variable reads its file.

    Arrays come without their padding where the checkpoint says their shapes (version 1.1 and
    later), and with it otherwise. Nothing that is stored is trusted: all of it is checked before
    it is decoded (`foreign_arrays`).

    Attributes:
      step: of the checkpoint.

    Raises:
      ConfigError: there are no variables of a Pax model, or they are not as Pax writes them.
    """

    def __init__(self, step: int, directory: Path):
        self.step, self._directory = step, directory
        origin = Origin(directory, _ADVICE)
        with origin.refusing():
            if directory.is_symlink():
                raise ConfigError("it is a symbolic link")
            self._shapes = _shapes(directory)
            state = directory / "state"
            # Version 0.0 has no directory per item.
            state = state if state.is_dir() else directory
            self._arrays: Mapping[str, np.ndarray | StoredArray]
            if (state / "checkpoint").exists() and not (state / DATABASE).exists():
                self._arrays = _msgpack_arrays(state, self._shapes)
            else:
                self._arrays = foreign_arrays(state, origin, _PREFIX)
            for path, shape in self._shapes.items():
                stored = self._arrays[path].shape if path in self._arrays else shape
                if len(stored) != len(shape) or any(map(np.less, stored, shape)):
                    raise ConfigError(
                        f"{shown(path, 300)} has the shape {stored}, and {shape} by its metadata"
                    )
        if not self._arrays:
            raise ConfigError(
                f"{directory} has no variables of a Pax model ({_PREFIX}*). Name the "
                "`checkpoints` directory of a Pax job, or one of its steps."
            )

    def shape_of(self, path: str) -> tuple[int, ...]:
        """Returns the shape of what `[path]` gives, without reading it."""
        return self._shapes.get(path, tuple(self._arrays[path].shape))

    def __getitem__(self, path: str) -> np.ndarray:
        """Raises: ConfigError: what would be cut off is not zeros."""
        array = self._arrays[path]
        if isinstance(array, StoredArray):
            array = array.read()
        cut = array[tuple(map(slice, self.shape_of(path)))]
        if np.count_nonzero(cut) != np.count_nonzero(array):
            raise ConfigError(
                f"{shown(path, 300)} in {self._directory} has shape {array.shape}, and {cut.shape} "
                "by its metadata, but beyond that not all is zeros. The checkpoint is damaged."
            )
        return cut

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
      ConfigError: there is no such checkpoint, or Pax did not write it; says what is there.
    """
    directory = local_directory(directory)
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory. Name a Pax job's checkpoints.")
    if (directory / "state").is_dir() and (result := _STEP.fullmatch(directory.name)):
        steps = {int(result[1]): directory}
    else:
        inner = directory / "checkpoints"
        directory = inner if inner.is_dir() else directory
        steps = {
            int(result[1]): path
            for path in directory.iterdir()
            # What a save has not finished has a longer name, so it does not match.
            if path.is_dir() and (result := _STEP.fullmatch(path.name))
        }
    if not steps or (step is not None and step not in steps):
        missing = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        numbers = ", ".join(map(str, sorted(steps)))
        there = f"Its steps are {numbers}" if steps else "It has no steps"
        raise ConfigError(
            f"{directory} has {missing}. {there}. Name a Pax job's `checkpoints` directory and one "
            "of its steps."
        )
    newest = max(steps) if step is None else step
    return PaxCheckpoint(newest, steps[newest])


def _shapes(directory: Path) -> Shapes:
    """Returns the unpadded shapes by path; {} of versions before 1.1, which do not say them."""
    if not (directory / "metadata").exists():
        return {}
    list(regular_files(directory / "metadata"))  # Raises where there is something else.
    name, shapes = "metadata/metadata", {}

    def add(path: str, node: Any) -> None:
        if not isinstance(node, dict):
            raise ConfigError(f"{name} has no shapes of variables at {shown(path, 300)!r}")
        if not node.get("_array_metadata_tag"):
            # In the order of JAX's trees, in which a msgpack checkpoint lists its arrays.
            for key in sorted(node):
                add(f"{path}/{key}" if path else key, node[key])
        elif "unpadded_shape" in node:
            if not is_shape(shape := node["unpadded_shape"]):
                raise ConfigError(f"{name} has the shape {shape!a:.80} of {shown(path, 300)!r}")
            shapes[path] = tuple(shape)

    tree = read_object(directory, name).get("train_state_metadata", {})
    add("", tree.get("mdl_vars", {}) if isinstance(tree, dict) else tree)
    return shapes


def _msgpack_arrays(state: Path, shapes: Shapes) -> dict[str, np.ndarray]:
    list(regular_files(state))
    file = state / "checkpoint"
    if (size := file.stat().st_size) > (free := available_bytes()):
        raise ConfigError(f"{file} has {size} bytes, and {free} are free in memory")
    try:
        content = flax.serialization.msgpack_restore(file.read_bytes())
        arrays = content.get("flattened_state")
    except (
        ValueError, TypeError, AttributeError, LookupError, RecursionError, MemoryError
    ) as error:
        raise ConfigError(f"{file} cannot be read ({ascii(str(error)):.200})") from None
    if arrays is None or not shapes:
        raise ConfigError(
            f"{file} lists arrays without their names, and there is no metadata of version 1.1 or "
            "later beside it to tell them. Restore the job with Pax, and save it with "
            "CheckpointType.GDA"
        )
    arrays = list(arrays.values() if isinstance(arrays, Mapping) else arrays)
    # A train state is (step, mdl_vars, opt_states, ...).
    result = dict(zip(shapes, arrays[1:], strict=False))
    for path, shape in shapes.items():
        if not isinstance(result.get(path), np.ndarray) or result[path].shape != shape:
            raise ConfigError(
                f"{file} has shape {np.shape(result.get(path))} where {shown(path, 300)} should "
                f"stand, but its metadata says {shape}. The two are not of one checkpoint"
            )
    return result
