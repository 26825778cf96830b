"""A model's safetensors files, read where they are needed: a tensor is a view of the file."""

import functools
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from praxis_lite.core.errors import ConfigError, require, shown
from praxis_lite.files.json_text import opened
from praxis_lite.host.optional_packages import optional_module

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
# In a job's directory: what the files had that the job began with, without the tensors.
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
      directory: with model.safetensors, or with several files and their index; or with what
        `described` returns as tensors.json, for their names and dtypes alone.

    Attributes:
      file_of: by tensor, the file that has it.

    Raises:
      ConfigError: there are no such files, only pickled ones, one is damaged, or the index names
        what is not there.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self._headers: dict[str, dict[str, Any]] = {}
        index = directory / INDEX
        if index.exists():
            self.file_of = self._indexed(index)
            if (directory / SINGLE).exists() and SINGLE not in self.file_of.values():
                raise ConfigError(
                    f"{directory} has {SINGLE} and {INDEX}, which names other files: one of the "
                    "two models is left over. Take it away; transformers would read the former."
                )
        elif (directory / SINGLE).exists():
            self.file_of = dict.fromkeys(self._header(SINGLE), SINGLE)
        elif (directory / DESCRIBED).exists():
            self._headers[DESCRIBED] = _described(directory / DESCRIBED)
            self.file_of = dict.fromkeys(self._headers[DESCRIBED], DESCRIBED)
        else:
            pickled = sorted(x.name for x in directory.glob("*.bin"))
            hint = (
                f"There is {pickled[0]}, a pickle, which can run code as it is read and is not "
                "read here. Have its owner save it with save_pretrained(safe_serialization=True)."
                if pickled else "Name the directory of a model of Hugging Face."
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
                f"{self.directory / self.file_of[name]}: {shown(name)} is of the type "
                f"{shown(str(kind))}; known are {', '.join(DTYPES)}."
            )
        return DTYPES[kind]

    def tensor(self, name: str) -> np.ndarray:
        """Returns a tensor as a view of its file: unused parts of it are not read."""
        file = self.file_of[name]
        if file == DESCRIBED:
            raise ConfigError(
                f"{self.directory} describes a model and has none of its weights, as the folder of "
                "a job does. Name the model's own directory; or export the job: python -m "
                "praxis_lite.tools.huggingface export JOB DIR."
            )
        start, stop = self._entry(name)["data_offsets"]
        data = self._data(file)[start:stop]
        return data.view(self.dtype(name)).reshape(self.shape(name))

    def described(self) -> dict[str, Any]:
        """Returns each tensor's dtype and shape, for JSON."""
        return {
            name: {key: self._entry(name)[key] for key in ("dtype", "shape")}
            for name in self.file_of
        }

    def _entry(self, name: str) -> dict[str, Any]:
        return self._header(self.file_of[name])[name]

    @functools.cache  # noqa: B019 - as long-lived as the files are used.
    def _data(self, file: str) -> np.ndarray:
        path = self.directory / file
        with opened(path) as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
        return np.memmap(path, np.uint8, mode="r", offset=8 + length)

    def _header(self, file: str) -> dict[str, Any]:
        if file not in self._headers:
            path = self.directory / file
            library = optional_module("safetensors", f"The model {path}")
            try:
                # Opened first: a pipe would be waited for.
                with opened(path) as stream, library.safe_open(path, framework="numpy"):
                    # The library checks lengths, types and that tensors lie side by side.
                    (length,) = struct.unpack("<Q", stream.read(8))
                    header = json.loads(stream.read(length))
            except (
                OSError, ValueError, RecursionError, struct.error, library.SafetensorError
            ) as error:
                words = shown(" ".join(str(error).split()), 300)
                raise ConfigError(f"{path} is no safetensors file: {words}.") from None
            header.pop("__metadata__", None)
            self._headers[file] = header
        return self._headers[file]

    def _indexed(self, path: Path) -> Mapping[str, str]:
        content = _json_of(path)
        file_of = content.get("weight_map") if isinstance(content, dict) else None
        is_index = isinstance(file_of, dict) and all(isinstance(x, str) for x in file_of.values())
        if not is_index:
            raise ConfigError(
                f"{path} is no index: wanted is an object with weight_map, the file of each tensor."
            )
        for file in sorted(set(file_of.values())):
            is_name = 0 < len(file) < 256 and "\0" not in file and Path(file).name == file
            require(
                is_name and (self.directory / file).is_file(),
                f"{path}: a file of weight_map", file, "the name of a file beside it",
            )
        missing = [name for name, file in file_of.items() if name not in self._header(file)]
        names = [shown(name) for name in missing[:3]]
        require(not missing, f"{path}: weight_map", names, "tensors that their files have")
        # As transformers does: a tensor that the index does not list is the model's all the same.
        whole = dict(file_of)
        for file in sorted(set(file_of.values())):
            for name in self._header(file):
                require(
                    whole.setdefault(name, file) == file, f"{path}: {shown(name)}",
                    f"in {shown(file)} and in {shown(whole[name])}", "in one of its files",
                )
        return whole


def _json_of(path: Path) -> Any:
    try:
        with opened(path) as file:
            return json.loads(file.read().decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON: {shown(str(error), 300)}.") from None


def _described(path: Path) -> dict[str, Any]:
    """Returns the description of tensors that `described` wrote."""
    content = _json_of(path)
    is_right = isinstance(content, dict) and all(
        isinstance(entry, dict) and isinstance(entry.get("dtype"), str)
        and isinstance(entry.get("shape"), list)
        and all(type(dim) is int and dim >= 0 for dim in entry["shape"])
        for entry in content.values()
    )
    if not is_right:
        raise ConfigError(
            f"{path} is not as praxis_lite wrote it: wanted are dtype and shape of each tensor. "
            "Copy it again from the job that it is of."
        )
    return content
