"""Writes a model's weights to safetensors files, with an index if there is more than one."""

import collections
import errno
import functools
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from praxis_lite.checkpoints.sharded_reading import in_groups
from praxis_lite.core.errors import format_bytes
from praxis_lite.host.optional_packages import optional_module
from praxis_lite.huggingface.tensors.tensor_files import INDEX, SINGLE
from praxis_lite.huggingface.weights import Part, as_tensor, tensor_shape

MAX_FILE_BYTES = 5_000_000_000


def write_tensors(
    directory: Path,
    parts: Sequence[Part],
    arrays: Mapping[str, jax.Array],
    mesh: Mesh,
    dtypes: Mapping[str, np.dtype],
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    note: Callable[[str], None] = lambda line: None,
) -> None:
    """Writes sharded weights to safetensors files of at most `max_file_bytes`.

    Every process must call this function, but only the first process writes. The host holds the
    tensors for only one file at a time.

    Args:
      directory: Existing directory.
      parts: Parts of all weights; tensors are written in this order.
      arrays: Weights, keyed by path, padded and sharded.
      mesh: Mesh of the arrays.
      dtypes: Dtype of each tensor.
      max_file_bytes: Maximum size of a file, unless a single tensor is larger.
      note: Called with a message after each file.
    """
    parts_by_tensor: dict[str, list[Part]] = collections.defaultdict(list)
    for part in parts:
        parts_by_tensor[part.tensor].append(part)
    sizes = {
        name: dtypes[name].itemsize * math.prod(tensor_shape(tensor_parts))
        for name, tensor_parts in parts_by_tensor.items()
    }
    # Plan all files first, because each name contains the number of files.
    files = list(in_groups(sizes, max_file_bytes))
    pieces = Pieces(arrays, mesh)
    weight_map: dict[str, str] = {}
    total = 0
    for number, names in enumerate(files, 1):
        file = (
            SINGLE if len(files) == 1 else (f"model-{number:05d}-of-{len(files):05d}.safetensors")
        )
        # Every process collects the tensors, because replicating a slice involves all devices.
        tensors = {}
        for name in names:
            tensor = as_tensor(
                parts_by_tensor[name],
                [pieces(x.path, x.index, x.piece_shape()) for x in parts_by_tensor[name]],
            )
            tensors[name] = np.ascontiguousarray(tensor.astype(dtypes[name]))
        if jax.process_index() == 0:
            save_tensors(tensors, directory / file)
        weight_map |= dict.fromkeys(names, file)
        total += sum(x.nbytes for x in tensors.values())
        note(f"wrote {file}, {format_bytes(total)} so far")
    if len(files) > 1 and jax.process_index() == 0:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", "utf-8")


def save_tensors(tensors: dict[str, np.ndarray], path: Path) -> None:
    """Writes a safetensors file; converts errors of the library to OSError."""
    library, numpy_api = (
        optional_module(name, f"The model {path}") for name in ("safetensors", "safetensors.numpy")
    )
    try:
        numpy_api.save_file(tensors, path, metadata={"format": "pt"})
    except library.SafetensorError as error:
        os_error = re.search(r"os error (\d+)", str(error))
        code = int(os_error[1]) if os_error else errno.EIO
        raise OSError(code, os.strerror(code), os.fspath(path)) from error


class Pieces:
    """Copies unpadded slices of sharded weights to the host, in every process."""

    def __init__(self, arrays: Mapping[str, jax.Array], mesh: Mesh):
        self.arrays, self.replicated = arrays, NamedSharding(mesh, PartitionSpec())

    def __call__(self, path: str, index: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
        """Returns the slice of a weight at an index in its leading dims, without padding."""
        take = self._take(shape, len(index))
        return np.asarray(take(self.arrays[path], np.array(index, np.int32)))

    @functools.cache  # noqa: B019 - needed for as long as the instance.
    def _take(self, shape: tuple[int, ...], num_leading: int) -> Callable[..., Any]:
        """Returns a compiled function that slices a weight and replicates the slice."""

        def take(weight: jax.Array, index: jax.Array) -> jax.Array:
            for dim in range(num_leading):
                weight = jax.lax.dynamic_index_in_dim(weight, index[dim], 0, keepdims=False)
            return weight[tuple(map(slice, shape))]

        return jax.jit(take, out_shardings=self.replicated)
