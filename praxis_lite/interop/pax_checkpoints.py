"""The variables in a checkpoint directory that Pax wrote, each read when it is asked for.

Of one step there lie `checkpoint_00000010/state` and, since version 1.0, `.../metadata/metadata`,
JSON that has since 1.1 the true shape of each variable. `state` is, by the job's settings,
- a directory per array, `mdl_vars.params.lm...`, in zarr form (CheckpointType.GDA),
- one OCDBT database with the same arrays (GDA with `tensorstore_use_ocdbt`), or
- a msgpack file with a list of arrays (CheckpointType.FLAX, of jobs without a mesh).
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import flax.serialization
import numpy as np
import tensorstore

from praxis_lite.config.json_text import parse_json
from praxis_lite.errors import ConfigError
from praxis_lite.job.job_dir import local_directory

_STEP = re.compile(r"(?:checkpoint_)?(\d+)")
_PREFIX = "mdl_vars."
# How an array's directory shows its driver.
_DRIVERS = {".zarray": "zarr", "zarr.json": "zarr3"}


class PaxCheckpoint(Mapping[str, np.ndarray]):
    """The variables of one step by path, "params/lm/softmax/..."; reading one reads its file.

    Arrays come at their true shapes where the checkpoint says these (version 1.1 and later), at
    their padded shapes otherwise.

    Attributes:
      step: of the checkpoint.
    """

    def __init__(self, step: int, directory: Path):
        self.step, self._directory = step, directory
        self._true_shapes = _true_shapes(directory)
        state = directory / "state"
        # Version 0.0 has no directory per item.
        state = state if state.is_dir() else directory
        if (state / "manifest.ocdbt").is_file():
            self._readers = _ocdbt_arrays(state)
        elif (state / "checkpoint").is_file():
            self._readers = _msgpack_arrays(state / "checkpoint", self._true_shapes)
        else:
            self._readers = _zarr_arrays(state)
        if not self._readers:
            raise ConfigError(
                f"{directory} has no variables of a Pax model ({_PREFIX}*). Name the "
                "`checkpoints` directory of a Pax job, or one of its steps."
            )

    def shape_of(self, path: str) -> tuple[int, ...]:
        """Returns the shape of what `[path]` gives, without reading it."""
        return self._true_shapes.get(path) or tuple(self._readers[path]().shape)

    def __getitem__(self, path: str) -> np.ndarray:
        """Raises: ConfigError: what lies beyond the true shape is not zeros."""
        array = self._readers[path]()
        if isinstance(array, tensorstore.TensorStore):
            array = array.read().result()
        shape = self._true_shapes.get(path, array.shape)
        true = array[tuple(map(slice, shape))]
        if true.shape != shape or np.count_nonzero(true) != np.count_nonzero(array):
            raise ConfigError(
                f"{path} in {self._directory} has shape {array.shape}, and {shape} by its "
                "metadata, but what lies beyond that is not zeros. The checkpoint is damaged."
            )
        return true

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


def read_pax_checkpoint(directory: str | Path, step: int | None = None) -> PaxCheckpoint:
    """Returns a checkpoint's variables by path, without the optimizer's slots.

    Args:
      directory: a job_log_dir of Pax, its `checkpoints`, or one step in there; a local path.
      step: which; None: the newest.

    Raises:
      ConfigError: there is no such checkpoint, or it is none of Pax's; says what is there.
    """
    directory = local_directory(directory)
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory. Name a Pax job's checkpoints.")
    if (directory / "state").is_dir() and (found := _STEP.fullmatch(directory.name)):
        steps = {int(found[1]): directory}
    else:
        inner = directory / "checkpoints"
        directory = inner if inner.is_dir() else directory
        steps = {
            int(found[1]): path
            for path in directory.iterdir()
            # What a save has not finished has a longer name, so it does not match.
            if path.is_dir() and (found := _STEP.fullmatch(path.name))
        }
    if not steps or (step is not None and step not in steps):
        wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise ConfigError(
            f"There is {wanted} in {directory}; it has the steps {sorted(steps)}. Name a Pax "
            "job's `checkpoints` directory and one of its steps."
        )
    newest = max(steps) if step is None else step
    return PaxCheckpoint(newest, steps[newest])


def _true_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Returns the shapes by path that the metadata says; none of versions before 1.1."""
    file = directory / "metadata" / "metadata"
    try:
        content = parse_json(file.read_text(encoding="utf-8")) if file.is_file() else {}
        tree = content.get("train_state_metadata", {}).get("mdl_vars", {})
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{file} is damaged, or Pax did not write it: {error}.") from None
    shapes: dict[str, tuple[int, ...]] = {}

    def add(path: str, node: Mapping[str, Any]) -> None:
        if node.get("_array_metadata_tag"):
            if "unpadded_shape" in node:
                shapes[path] = tuple(node["unpadded_shape"])
            return
        # In the order of JAX's trees, in which a msgpack checkpoint lists its arrays.
        for name in sorted(node):
            add(f"{path}/{name}" if path else name, node[name])

    add("", tree)
    return shapes


# By path what gives an array, or opens it: a TensorStore knows its shape, and reads when asked to.
Readers = dict[str, Callable[[], np.ndarray | tensorstore.TensorStore]]


def _zarr_arrays(state: Path) -> Readers:
    def reader(directory: Path) -> Callable[[], tensorstore.TensorStore]:
        driver = next(
            (driver for name, driver in _DRIVERS.items() if (directory / name).is_file()), "zarr"
        )
        return lambda: _open(driver, {"driver": "file", "path": str(directory)})

    return {_path(d.name): reader(d) for d in sorted(state.glob(f"{_PREFIX}*")) if d.is_dir()}


def _ocdbt_arrays(state: Path) -> Readers:
    base = {"driver": "file", "path": f"{state}/"}

    def reader(name: str, driver: str) -> Callable[[], tensorstore.TensorStore]:
        return lambda: _open(driver, {"driver": "ocdbt", "base": base, "path": name})

    keys = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result().list().result()
    names = sorted(key.decode().rpartition("/")[::2] for key in keys)
    return {
        _path(name): reader(name, _DRIVERS[file])
        for name, file in names
        if name.startswith(_PREFIX) and file in _DRIVERS
    }


def _msgpack_arrays(file: Path, true_shapes: Mapping[str, tuple[int, ...]]) -> Readers:
    try:
        content = flax.serialization.msgpack_restore(file.read_bytes())
        arrays = content.get("flattened_state")
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        raise ConfigError(f"{file} is damaged, or Pax did not write it: {error}.") from None
    if arrays is None or not true_shapes:
        raise ConfigError(
            f"{file} lists arrays without their names, and there is no metadata of version 1.1 or "
            "later beside it to tell them. Restore the job with Pax, and save it with "
            "CheckpointType.GDA."
        )
    arrays = list(arrays.values() if isinstance(arrays, Mapping) else arrays)
    # A train state is (step, mdl_vars, opt_states, ...).
    found = dict(zip(true_shapes, arrays[1:], strict=False))
    for path, shape in true_shapes.items():
        if np.shape(found.get(path)) != shape:
            raise ConfigError(
                f"{file} has shape {np.shape(found.get(path))} where {path} should stand, but its "
                f"metadata says {shape}. The two are not of one checkpoint."
            )
    return {path: lambda array=array: array for path, array in found.items()}


def _open(driver: str, kvstore: Mapping[str, Any]) -> tensorstore.TensorStore:
    spec = {"driver": driver, "kvstore": dict(kvstore)}
    return tensorstore.open(spec, open=True, read=True).result()


def _path(name: str) -> str:
    return name.removeprefix(_PREFIX).replace(".", "/")
