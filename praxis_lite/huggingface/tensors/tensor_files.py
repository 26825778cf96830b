"""A model's safetensors files: a tensor is a view of its memory-mapped file."""

import functools
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from praxis_lite.core.errors import ConfigError, require, shown
from praxis_lite.host.optional_packages import optional_module

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
# In a job's directory: names, dtypes and shapes of the tensors that the job began with.
DESCRIBED = "tensors.json"
DTYPES = {
    "F64": np.dtype(np.float64), "F32": np.dtype(np.float32), "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16), "BOOL": np.dtype(bool), "U8": np.dtype(np.uint8),
    "I32": np.dtype(np.int32), "I64": np.dtype(np.int64),
}
# By their names in config.json.
FLOATS = {"float32": DTYPES["F32"], "bfloat16": DTYPES["BF16"], "float16": DTYPES["F16"]}


class TensorFiles:
    """The tensors of a directory, by name.

    Args:
      directory: with model.safetensors, or with several files and their index; or with a
        tensors.json of `description`, which has names, shapes and dtypes but no values.

    Attributes:
      file_of: by tensor, the file that has it.

    Raises:
      ConfigError: there are no such files, only pickled ones, or a file is missing or damaged.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self._headers: dict[str, dict[str, Any]] = {}
        if (directory / INDEX).exists():
            files = sorted(set(_json_of(directory / INDEX)["weight_map"].values()))
            for file in files:
                require(
                    (directory / file).is_file(), f"{directory / INDEX}: a file of weight_map",
                    file, "a file in the same directory", "Complete the download.",
                )
            if (directory / SINGLE).exists() and SINGLE not in files:
                raise ConfigError(
                    f"{directory} has {SINGLE} and {INDEX}, which names other files: one of the "
                    f"two models is left over. Remove it; transformers would read {SINGLE}."
                )
            # Tensors that the index does not list count too, as in transformers.
            self.file_of = {name: file for file in files for name in self._header(file)}
        elif (directory / SINGLE).exists():
            self.file_of = dict.fromkeys(self._header(SINGLE), SINGLE)
        elif (directory / DESCRIBED).exists():
            self._headers[DESCRIBED] = _json_of(directory / DESCRIBED)
            self.file_of = dict.fromkeys(self._headers[DESCRIBED], DESCRIBED)
        else:
            pickled = sorted(x.name for x in directory.glob("*.bin"))
            hint = (
                f"There is {pickled[0]}, a pickle, which can run code when it is read and is not "
                "supported. Convert it with save_pretrained(safe_serialization=True)."
                if pickled else "Name the directory of a Hugging Face model."
            )
            raise ConfigError(f"{directory} has neither {SINGLE} nor {INDEX}. {hint}")

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns a tensor's shape."""
        return tuple(self._entry(name)["shape"])

    def dtype(self, name: str) -> np.dtype:
        """Returns a tensor's dtype."""
        kind = self._entry(name)["dtype"]
        if kind not in DTYPES:
            raise ConfigError(
                f"{self.directory / self.file_of[name]}: {name} has the dtype {kind}; supported "
                f"are {', '.join(DTYPES)}."
            )
        return DTYPES[kind]

    def tensor(self, name: str) -> np.ndarray:
        """Returns a tensor as a view of its file: unused parts of it are not read."""
        file = self.file_of[name]
        if file == DESCRIBED:
            raise ConfigError(
                f"{self.directory} describes a model but has none of its weights: it is the folder "
                "of a job. Name the model's own directory, or export the job: python -m "
                "praxis_lite.huggingface export JOB DIR."
            )
        start, stop = self._entry(name)["data_offsets"]
        data = self._data(file)[start:stop]
        return data.view(self.dtype(name)).reshape(self.shape(name))

    def description(self) -> dict[str, Mapping[str, Any]]:
        """Returns each tensor's dtype and shape, for tensors.json."""
        return {
            name: {key: self._entry(name)[key] for key in ("dtype", "shape")}
            for name in self.file_of
        }

    def _entry(self, name: str) -> dict[str, Any]:
        return self._header(self.file_of[name])[name]

    @functools.cache  # noqa: B019 - as long-lived as the files are used.
    def _data(self, file: str) -> np.ndarray:
        path = self.directory / file
        with path.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
        return np.memmap(path, np.uint8, mode="r", offset=8 + length)

    def _header(self, file: str) -> dict[str, Any]:
        if file not in self._headers:
            path = self.directory / file
            library = optional_module("safetensors", f"The model {path}")
            try:
                # The library checks that the header fits the file.
                with library.safe_open(path, framework="numpy"), path.open("rb") as stream:
                    (length,) = struct.unpack("<Q", stream.read(8))
                    header = json.loads(stream.read(length))
            except (OSError, library.SafetensorError) as error:
                reason = shown(" ".join(str(error).split()), 300)
                raise ConfigError(f"{path} cannot be read as safetensors: {reason}.") from None
            header.pop("__metadata__", None)
            self._headers[file] = header
        return self._headers[file]


def _json_of(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not JSON: {shown(str(error), 300)}.") from None
