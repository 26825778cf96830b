"""Reads a model's weights onto a mesh; each process reads only the bytes of its shards."""

import collections
import dataclasses
import logging
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from praxis_lite.core.errors import ConfigError, first_few, format_bytes
from praxis_lite.core.partitioner.train_state import LeafLayout
from praxis_lite.huggingface.family import EMBEDDING, HEAD, Family
from praxis_lite.huggingface.tensors.tensor_files import TensorFiles
from praxis_lite.huggingface.weights import Part, tensor_shape

SECONDS_BETWEEN_NOTES = 5.0


def parts_in_files(
    family: Family, parts: Sequence[Part], files: TensorFiles, skipped_layers: Sequence[int] = ()
) -> list[Part]:
    """Matches parts with the tensors in the files; tensor names may have an additional prefix.

    Args:
      family: Table of the model's family.
      parts: Parts from `map_tensors`.
      files: Files of the model.
      skipped_layers: Indices of layers whose tensors are not read.

    Returns:
      The parts with the names of the tensors in these files.

    Raises:
      ConfigError: A tensor is missing, has the wrong shape or dtype, or is unknown.
    """
    names: dict[str, str] = {}  # Maps tensor names in the table to names in the files.
    for part in parts:
        for name in (part.tensor, family.optional_prefix + part.tensor):
            if name in files.file_of:
                names.setdefault(part.tensor, name)
    missing = sorted({part.tensor for part in parts} - names.keys())
    if missing:
        tied = (
            " If the model ties its head to the embedding, set tie_word_embeddings to true in "
            "config.json."
            if _heads(family) & set(missing)
            else ""
        )
        raise ConfigError(
            f"{files.directory}: the checkpoint lacks {first_few(missing)}, which config.json "
            f"requires.{tied}"
        )
    _check_shapes_and_dtypes(parts, names, files)
    _check_other_tensors(family, names, files, skipped_layers)
    return [dataclasses.replace(part, tensor=names[part.tensor]) for part in parts]


def _check_shapes_and_dtypes(
    parts: Sequence[Part], names: Mapping[str, str], files: TensorFiles
) -> None:
    """Checks that tensors have the shapes that config.json implies, and contain floats.

    Args:
      parts: See `parts_in_files`.
      names: Names of the tensors in the files, keyed by the names in `parts`.
      files: Files of the model.
    """
    parts_by_tensor: dict[str, list[Part]] = collections.defaultdict(list)
    for part in parts:
        parts_by_tensor[part.tensor].append(part)
    for name, tensor_parts in parts_by_tensor.items():
        expected = tensor_shape(tensor_parts)
        actual = files.shape(names[name])
        if actual != expected:
            raise ConfigError(
                f"{files.directory}: {names[name]} has the shape {actual}, but config.json implies "
                f"{expected}. Check that config.json and the weights belong to the same model."
            )
    for name in names.values():
        if not jnp.issubdtype(files.dtype(name), jnp.floating):
            raise ConfigError(
                f"{files.directory}: {name} has the dtype {files.dtype(name)}; expected floats. "
                "Quantized models are not supported. Convert the weights to bfloat16 with "
                "transformers."
            )


def _check_other_tensors(
    family: Family, names: Mapping[str, str], files: TensorFiles, skipped_layers: Sequence[int]
) -> None:
    """Checks that all tensors without parts are skipped, or are copies of a tied embedding.

    Args:
      family: See `parts_in_files`.
      names: Names of the tensors with parts in the files, keyed by the names in the table.
      files: Files of the model.
      skipped_layers: See `parts_in_files`.
    """
    known, heads = set(names.values()), _heads(family)
    skipped = [
        re.escape(x).replace(r"\{layer\}", r"\d+").replace(r"\{any\}", ".*") for x in family.skipped
    ]
    skipped += [rf".*layers\.{number}\..*" for number in skipped_layers]
    prefix = f"({re.escape(family.optional_prefix)})?"
    is_skipped = re.compile(f"{prefix}({'|'.join(skipped)})").fullmatch
    unknown = [
        x
        for x in files.file_of
        if x not in known
        and not (skipped and is_skipped(x))
        and not (x in heads and _is_embedding(x, files, family, names))
    ]
    if heads & set(unknown):
        raise ConfigError(
            f"{files.directory}: config.json ties the head to the embedding (tie_word_embeddings), "
            f"but the checkpoint contains a different {first_few(sorted(heads))}, which would be "
            "ignored. If the head is separate, set tie_word_embeddings to false in config.json."
        )
    if unknown:
        raise ConfigError(
            f"{files.directory}: the checkpoint contains the unknown tensors "
            f"{first_few(sorted(unknown))}, which would be ignored. Add them to the table of "
            f"{family.name}, or remove them from the checkpoint."
        )


def _heads(family: Family) -> set[str]:
    """Returns the output head's tensors, which a model that ties its weights does not have."""
    return {name for name, entry in family.tensors.items() if entry.to == (HEAD,)}


def _is_embedding(name: str, files: TensorFiles, family: Family, names: Mapping[str, str]) -> bool:
    """Returns whether a tied model's checkpoint repeats the embedding as its head."""
    (embedding,) = (x for x, entry in family.tensors.items() if entry.to == (EMBEDDING,))
    shapes = files.shape(names[embedding]), files.shape(name)
    return shapes[0] == shapes[1] and np.array_equal(
        files.tensor(names[embedding]), files.tensor(name), equal_nan=True
    )


def read_weights(
    leaves: Sequence[LeafLayout],
    mesh: Mesh,
    parts: Sequence[Part],
    files: TensorFiles,
    note: Callable[[str], None],
    convert: Callable[[str, jax.Array], Mapping[str, jax.Array]],
) -> dict[str, jax.Array]:
    """Reads weights onto a mesh. Returns padded and sharded arrays, keyed by path.

    The host buffers one shard at a time.

    Args:
      leaves: Layouts of the weights.
      mesh: Mesh on which the weights are placed.
      parts: Parts of all weights, from `parts_in_files`.
      files: Files of the model.
      note: Called with a progress message every few seconds.
      convert: Function that takes the path and array of a weight, and returns the arrays to store
        for this weight, keyed by path.
    """
    parts_by_weight: dict[str, list[Part]] = collections.defaultdict(list)
    for part in parts:
        parts_by_weight[part.path].append(part)
    total = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    start = last_note = time.monotonic()
    arrays: dict[str, jax.Array] = {}
    done = 0
    for leaf in leaves:
        weight = _read_sharded(leaf, mesh, parts_by_weight[leaf.path], files)
        arrays |= convert(leaf.path, weight)
        done += math.prod(leaf.shape) * leaf.dtype.itemsize
        if time.monotonic() - last_note > SECONDS_BETWEEN_NOTES:
            last_note = time.monotonic()
            note(f"read {format_bytes(done)} of {format_bytes(total)}, {last_note - start:.0f} s")
    seconds = time.monotonic() - start
    rate = f", {format_bytes(int(total / seconds))} per s" if seconds >= 1 else ""
    note(f"read {format_bytes(total)} in {seconds:.1f} s{rate}")
    return arrays


def _read_sharded(
    leaf: LeafLayout, mesh: Mesh, parts: Sequence[Part], files: TensorFiles
) -> jax.Array:
    """Reads a weight, and transfers each shard to its devices before reading the next one.

    `jax.make_array_from_callback` would store the shards for all devices on the host at once.
    """
    sharding = NamedSharding(mesh, leaf.spec)
    # The devices that store each shard, by the shard's bounds. Replicas are read only once.
    devices_of = collections.defaultdict(list)
    for device, index in sharding.addressable_devices_indices_map(leaf.padded_shape).items():
        assert index is not None, "Each addressable device has a shard."
        sizes = zip(index, leaf.padded_shape, strict=True)
        devices_of[tuple(x.indices(size)[:2] for x, size in sizes)].append(device)
    on_devices = []
    for bounds, devices in devices_of.items():
        shard = _read_shard(leaf, tuple(slice(*x) for x in bounds), parts, files)
        if not _is_finite(shard):
            names = {part.tensor for part in parts if not _is_finite(files.tensor(part.tensor))}
            _log.warning(
                "%s contains NaN or infinite values in %s, so the outputs will be NaN. Download "
                "the files again.",
                files.directory,
                first_few(sorted(names)),
            )
        on_devices += jax.block_until_ready([jax.device_put(shard, x) for x in devices])
    return jax.make_array_from_single_device_arrays(
        leaf.padded_shape, sharding, on_devices, dtype=leaf.dtype
    )


def _read_shard(
    leaf: LeafLayout, bounds: tuple[slice, ...], parts: Sequence[Part], files: TensorFiles
) -> np.ndarray:
    """Returns the slice of a weight at `bounds` in its padded shape."""
    shard = np.zeros([x.stop - x.start for x in bounds], leaf.dtype)
    for part in parts:
        # Skip parts outside the shard, such as layers or experts on other devices.
        num_leading = len(part.index)
        index = [i - x.start for i, x in zip(part.index, bounds, strict=False)]
        sizes = [x.stop - x.start for x in bounds[:num_leading]]
        if any(not 0 <= i < size for i, size in zip(index, sizes, strict=True)):
            continue
        piece = part.to_weight_layout(files.tensor(part.tensor))[bounds[num_leading:]]
        # Padding beyond the logical shape stays zero.
        shard[(*index, *map(slice, piece.shape))] = piece
    return shard


def _is_finite(array: np.ndarray) -> bool:
    # Try the dot product first, because it allocates no array. The dot product may overflow for
    # finite values.
    flat = array.reshape(-1)
    return bool(np.isfinite(np.vdot(flat, flat)) or np.isfinite(array).all())


_log = logging.getLogger(__name__)
