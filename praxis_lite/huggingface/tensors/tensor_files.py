"""Memory-mapped access to the tensors in a model's safetensors files."""

import functools
import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from praxis_lite.core.errors import ConfigError, require, shortened
from praxis_lite.host.optional_packages import optional_module
from praxis_lite.host.places import is_url, local_folder
from praxis_lite.inputs.tokenizers.files import CONFIG, PATTERNS
from praxis_lite.job.local_directory import local_directory

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
# File in a job directory with the names, dtypes and shapes of the base model's tensors.
DESCRIBED = "tensors.json"
DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "BOOL": np.dtype(bool),
    "U8": np.dtype(np.uint8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}
# Dtypes keyed by their names in config.json.
FLOATS = {"float32": DTYPES["F32"], "bfloat16": DTYPES["BF16"], "float16": DTYPES["F16"]}


def model_folder(path: str | os.PathLike[str], *, with_weights: bool = True) -> Path:
    """Returns the folder of a model, after downloading it if the path is a URL.

    Args:
      path: Directory of the model, hf://org/name[@revision], or the URL of a folder in a store.
      with_weights: Whether to download safetensors files as well as config.json and the tokenizer.

    Raises:
      ConfigError: See `local_folder` and `local_directory`.
    """
    if not is_url(path):
        return local_directory(path)
    weights = (INDEX, "model*.safetensors") if with_weights else ()
    return local_folder(path, (CONFIG, *PATTERNS, *weights))


class TensorFiles:
    """The tensors in a directory's safetensors files.

    Args:
      directory: Directory that contains one of: model.safetensors; several safetensors files and
        their index; a job's tensors.json, which lists names, shapes and dtypes without values.

    Attributes:
      file_of: File that contains each tensor.

    Raises:
      ConfigError: There are no safetensors files, or one of them is missing or damaged.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self._headers: dict[str, dict[str, Any]] = {}
        if (directory / INDEX).exists():
            files = sorted(set(_json_of(directory / INDEX)["weight_map"].values()))
            for file in files:
                require(
                    (directory / file).is_file(),
                    f"{directory / INDEX}: a file of weight_map",
                    file,
                    "a file in the same directory",
                    "Complete the download.",
                )
            if (directory / SINGLE).exists() and SINGLE not in files:
                raise ConfigError(
                    f"{directory} contains two models: {SINGLE} and the files that {INDEX} lists. "
                    f"Remove one of them; transformers would read {SINGLE}."
                )
            # Like transformers, include tensors that the index does not list.
            self.file_of = {name: file for file in files for name in self._header(file)}
        elif (directory / SINGLE).exists():
            self.file_of = dict.fromkeys(self._header(SINGLE), SINGLE)
        elif (directory / DESCRIBED).exists():
            self._headers[DESCRIBED] = _json_of(directory / DESCRIBED)
            self.file_of = dict.fromkeys(self._headers[DESCRIBED], DESCRIBED)
        else:
            pickled = sorted(x.name for x in directory.glob("*.bin"))
            hint = (
                f"{pickled[0]} is a pickle, which is not supported because reading it can execute "
                "arbitrary code. Convert it with save_pretrained(safe_serialization=True)."
                if pickled
                else "Specify the directory of a Hugging Face model."
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
                f"{self.directory / self.file_of[name]}: {name} has the dtype {kind}; expected one "
                f"of {', '.join(DTYPES)}."
            )
        return DTYPES[kind]

    def tensor(self, name: str) -> np.ndarray:
        """Returns a tensor as a view of its memory-mapped file."""
        file = self.file_of[name]
        if file == DESCRIBED:
            raise ConfigError(
                f"{self.directory} contains no weights, only a job's copy of the model's config, "
                "tokenizer and shapes. Specify the original directory of the model, or export the "
                "job with praxis hf export JOB DIR."
            )
        start, stop = self._entry(name)["data_offsets"]
        data = self._data(file)[start:stop]
        return data.view(self.dtype(name)).reshape(self.shape(name))

    def description(self) -> dict[str, Mapping[str, Any]]:
        """Returns the dtype and shape of each tensor, as the contents of tensors.json."""
        return {
            name: {key: self._entry(name)[key] for key in ("dtype", "shape")}
            for name in self.file_of
        }

    def _entry(self, name: str) -> dict[str, Any]:
        return self._header(self.file_of[name])[name]

    @functools.cache  # noqa: B019 - needed for as long as the instance.
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
                # safe_open checks that the header matches the file.
                with library.safe_open(path, framework="numpy"), path.open("rb") as stream:
                    (length,) = struct.unpack("<Q", stream.read(8))
                    header = json.loads(stream.read(length))
            except (OSError, library.SafetensorError) as error:
                reason = shortened(" ".join(str(error).split()), 300)
                raise ConfigError(f"{path} cannot be read as safetensors: {reason}.") from None
            header.pop("__metadata__", None)
            self._headers[file] = header
        return self._headers[file]


def _json_of(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not JSON: {shortened(str(error), 300)}.") from None
