"""Reads a model's weights onto a mesh; each device's shard reads only its own bytes."""

import collections
import dataclasses
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from praxis_lite.core.errors import ConfigError, few, format_bytes
from praxis_lite.core.partitioner.train_state import LeafLayout
from praxis_lite.huggingface.family import EMBEDDING, HEAD, Family
from praxis_lite.huggingface.tensors.tensor_files import TensorFiles
from praxis_lite.huggingface.weights import Part, tensor_shape

SECONDS_BETWEEN_LINES = 5.0


def parts_in_files(
    family: Family, parts: Sequence[Part], files: TensorFiles, left_out: Sequence[int] = ()
) -> list[Part]:
    """Returns the parts with their tensors' names in these files, which may have a prefix.

    Args:
      left_out: the numbers of layers whose tensors are not read.

    Raises:
      ConfigError: a tensor is missing, has another shape, or is unknown.
    """
    prefix, names = family.optional_prefix, {}
    for part in parts:
        for name in (part.tensor, prefix + part.tensor):
            if name in files.file_of:
                names.setdefault(part.tensor, name)
    missing = sorted({part.tensor for part in parts} - names.keys())
    heads = {name for name, entry in family.tensors.items() if entry.to == (HEAD,)}
    if missing:
        tied = (
            " If the head is the embedding, set tie_word_embeddings to true in config.json."
            if heads & set(missing) else ""
        )
        raise ConfigError(
            f"{files.directory}: the checkpoint lacks {few(missing)}, which config.json needs."
            f"{tied}"
        )
    joined: dict[str, list[Part]] = collections.defaultdict(list)
    for part in parts:
        joined[part.tensor].append(part)
    for name, of_tensor in joined.items():
        expected = tensor_shape(of_tensor)
        actual = files.shape(names[name])
        if actual != expected:
            raise ConfigError(
                f"{files.directory}: {names[name]} has the shape {actual}, but config.json implies "
                f"{expected}. The files are of another model, or config.json was changed."
            )
    for name in names.values():
        if not jnp.issubdtype(files.dtype(name), jnp.floating):
            raise ConfigError(
                f"{files.directory}: {name} has the dtype {files.dtype(name)}; expected floats. "
                "Quantized models are not supported: let transformers write the weights in "
                "bfloat16."
            )
    known = set(names.values())
    skipped = [
        re.escape(x).replace(r"\{layer\}", r"\d+").replace(r"\{any\}", ".*") for x in family.skipped
    ]
    skipped += [rf".*layers\.{number}\..*" for number in left_out]
    is_skipped = re.compile(f"({re.escape(prefix)})?({'|'.join(skipped)})").fullmatch
    unknown = [
        x for x in files.file_of if x not in known and not (skipped and is_skipped(x))
        and not (x in heads and _is_embedding(x, files, family, names))
    ]
    if heads & set(unknown):
        raise ConfigError(
            f"{files.directory}: config.json ties the head to the embedding (tie_word_embeddings), "
            f"but the checkpoint has a {few(sorted(heads))} with other values, which would be lost."
            " If the head is separate, set tie_word_embeddings to false in config.json."
        )
    if unknown:
        raise ConfigError(
            f"{files.directory}: the checkpoint has {few(sorted(unknown))}, which are not in the "
            f"table of {family.name} and would be lost."
        )
    return [dataclasses.replace(part, tensor=names[part.tensor]) for part in parts]


def _is_embedding(
    name: str, files: TensorFiles, family: Family, names: Mapping[str, str]
) -> bool:
    """Returns whether a tied model's checkpoint repeats the embedding as its head."""
    (embedding,) = (x for x, entry in family.tensors.items() if entry.to == (EMBEDDING,))
    shapes = files.shape(names[embedding]), files.shape(name)
    return shapes[0] == shapes[1] and np.array_equal(
        files.tensor(names[embedding]), files.tensor(name), equal_nan=True
    )


def read_weights(
    leaves: Sequence[LeafLayout], mesh: Mesh, parts: Sequence[Part], files: TensorFiles,
    note: Callable[[str], None], kept: Callable[[str, jax.Array], Mapping[str, jax.Array]],
) -> dict[str, jax.Array]:
    """Returns weights by path, padded and sharded.

    Besides the result, the host's memory has one shard at a time.

    Args:
      parts: of all weights, from `parts_in_files`.
      note: called with the progress now and then.
      kept: converts a weight and its path to the arrays by path that are stored for it.
    """
    of_weight: dict[str, list[Part]] = collections.defaultdict(list)
    for part in parts:
        of_weight[part.path].append(part)
    total = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    start = last = time.monotonic()
    arrays, done = {}, 0
    for leaf in leaves:
        weight = _on_devices(leaf, mesh, of_weight[leaf.path], files, note)
        arrays |= kept(leaf.path, weight)
        done += math.prod(leaf.shape) * leaf.dtype.itemsize
        if time.monotonic() - last > SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            note(f"read {format_bytes(done)} of {format_bytes(total)}, {last - start:.0f} s")
    seconds = time.monotonic() - start
    rate = f", {format_bytes(int(total / seconds))} per s" if seconds >= 1 else ""
    note(f"read {format_bytes(total)} in {seconds:.1f} s{rate}")
    return arrays


def _on_devices(
    leaf: LeafLayout, mesh: Mesh, parts: Sequence[Part], files: TensorFiles,
    note: Callable[[str], None],
) -> jax.Array:
    """Returns a weight; each shard is on its devices before the next is read.

    `jax.make_array_from_callback` would have the shards of all devices on the host at once.
    """
    sharding = NamedSharding(mesh, leaf.spec)
    devices_of = collections.defaultdict(list)
    for device, index in sharding.addressable_devices_indices_map(leaf.padded_shape).items():
        sizes = zip(index, leaf.padded_shape, strict=True)
        devices_of[tuple(x.indices(size)[:2] for x, size in sizes)].append(device)
    on_devices = []
    for bounds, devices in devices_of.items():
        shard = _shard(leaf, tuple(slice(*x) for x in bounds), parts, files)
        if not _is_finite(shard):
            names = {part.tensor for part in parts if not _is_finite(files.tensor(part.tensor))}
            note(
                f"WARNING: {files.directory} has NaN or infinite numbers in {few(sorted(names))}, "
                "so the outputs will be NaN. Get another copy of the file."
            )
        on_devices += jax.block_until_ready([jax.device_put(shard, x) for x in devices])
    return jax.make_array_from_single_device_arrays(
        leaf.padded_shape, sharding, on_devices, dtype=leaf.dtype
    )


def _shard(
    leaf: LeafLayout, bounds: tuple[slice, ...], parts: Sequence[Part], files: TensorFiles
) -> np.ndarray:
    shard = np.zeros([x.stop - x.start for x in bounds], leaf.dtype)
    for part in parts:
        leading = len(part.index)
        place = [i - x.start for i, x in zip(part.index, bounds, strict=False)]
        sizes = [x.stop - x.start for x in bounds[:leading]]
        if any(not 0 <= i < size for i, size in zip(place, sizes, strict=True)):
            continue
        ours = part.to_weight_layout(files.tensor(part.tensor))[bounds[leading:]]
        # Padding beyond the logical shape stays zero.
        shard[(*place, *map(slice, ours.shape))] = ours
    return shard


def _is_finite(array: np.ndarray) -> bool:
    # Try the product first: it allocates no array. It may overflow for finite numbers.
    flat = array.reshape(-1)
    return bool(np.isfinite(np.vdot(flat, flat)) or np.isfinite(array).all())
