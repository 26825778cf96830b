"""Checks batches, places them on the mesh, and reshards them inside steps."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.sharding.leaf_paths import leaves_with_path
from praxis_lite.core.sharding.split_dims import SplitDims, constrain, to_partition_spec

__all__ = (
    "GlobalBatch",
    "InputsSplitMapping",
    "abstract_global_batch",
    "batch_spec",
    "global_batch",
    "is_true_row",
    "num_rows_of",
    "replicated_key",
    "reshard_by_rank",
)

PyTree = Any
# Maps a rank ("map_1d", "map_2d", ...) to the split dims of arrays with that rank. None means that
# the arrays are not resharded.
InputsSplitMapping = Mapping[str, SplitDims] | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GlobalBatch:
    """A batch of global arrays whose rows are padded to a multiple of the number of devices.

    Attributes:
      inputs: Arrays [padded rows, ...], split along dim 0 over all mesh axes, and replicated
        scalars.
      num_rows: Number of real rows. It is static, so that XLA can slice off the padding for free.
    """

    inputs: PyTree
    num_rows: int = dataclasses.field(metadata={"static": True})


def batch_spec(rank: int, axis_names: Sequence[str]) -> PartitionSpec:
    """Returns the PartitionSpec that splits dim 0 of an input over all mesh axes.

    Scalars are replicated. Corresponds to Pax's `shard_on_batch_dim_partition_spec`.
    """
    return PartitionSpec(tuple(axis_names), *[None] * (rank - 1)) if rank else PartitionSpec()


def num_rows_of(inputs: PyTree) -> int:
    """Returns the number of rows (dim 0) of a batch, or 0 if all leaves are scalars.

    Raises:
      ConfigError: The leaves have different numbers of rows. The message lists their shapes.
    """
    rows = {path: leaf.shape for path, leaf in leaves_with_path(inputs) if leaf.ndim}
    if len({shape[0] for shape in rows.values()}) > 1:
        shapes = ", ".join(f"{name} {shape}" for name, shape in rows.items())
        raise ConfigError(
            f"The leaves of a batch disagree on the number of rows (the first dim): {shapes}. "
            "Change the input pipeline so that all leaves have the same first dim."
        )
    return next(iter(rows.values()))[0] if rows else 0


def is_true_row(inputs: Mapping[str, Any]) -> Any:
    """Returns a bool array [B] that is True for rows with a nonzero weight.

    Args:
      inputs: NumPy or JAX arrays. Without "weights", the result is True for all rows.
    """
    num_rows = num_rows_of(inputs)
    if "weights" not in inputs:
        return np.ones(num_rows, bool)
    return (inputs["weights"].reshape(num_rows, -1) != 0).any(axis=1)


def process_rows(num_rows: int, mesh: Mesh, process_index: int | None = None) -> slice:
    """Returns the slice of a batch's rows that a process feeds to its devices.

    The batch is padded to a multiple of the number of devices and split over all of them in mesh
    order, so a process may feed fewer rows than other processes, or none at all. If the process's
    devices are not contiguous in mesh order, the slice includes the rows in between.

    Args:
      num_rows: Number of rows of the global batch.
      mesh: Mesh whose axes all split the rows.
      process_index: Index of the process. If None, the current process.
    """
    index = jax.process_index() if process_index is None else process_index
    rows_per_device = math.ceil(num_rows / mesh.size)
    positions = [i for i, device in enumerate(mesh.devices.flat) if device.process_index == index]
    if not positions:
        return slice(0, 0)
    start, stop = positions[0] * rows_per_device, (positions[-1] + 1) * rows_per_device
    return slice(min(start, num_rows), min(stop, num_rows))


def global_batch(inputs: PyTree, mesh: Mesh, num_rows: int | None = None) -> GlobalBatch:
    """Places a batch on the mesh as global arrays, padded with rows of zeros.

    In a job with several processes, each process passes either the complete batch or, with
    `num_rows`, only the rows for its devices.

    Args:
      inputs: NumPy arrays with the rows `process_rows(num_rows, mesh)`, or with all rows of the
        global batch if `num_rows` is None.
      mesh: Mesh whose axes all split the rows.
      num_rows: Number of rows of the global batch; None if `inputs` contain the complete batch.

    Raises:
      ConfigError: The leaves have different numbers of rows.
    """
    num_local_rows = num_rows_of(inputs)
    is_global = num_rows is None
    num_rows = num_local_rows if num_rows is None else num_rows
    padded_rows = math.ceil(num_rows / mesh.size) * mesh.size
    shardings = jax.tree.map(
        lambda x: NamedSharding(mesh, batch_spec(x.ndim, mesh.axis_names)), inputs
    )
    if jax.process_count() == 1:

        def pad(x: np.ndarray) -> np.ndarray:
            if x.ndim == 0 or padded_rows == num_rows:
                return x
            return np.concatenate([x, np.zeros((padded_rows - num_rows, *x.shape[1:]), x.dtype)])

        return GlobalBatch(jax.device_put(jax.tree.map(pad, inputs), shardings), num_rows)
    # Index of the first local row in the global batch. `block` returns the rows of a device, padded
    # at the end of the batch.
    first = 0 if is_global else process_rows(num_rows, mesh).start

    def place(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
        def block(index: tuple[slice, ...] | None) -> np.ndarray:
            if not index:
                return x
            start, stop, _ = index[0].indices(padded_rows)
            rows = x[start - first : max(min(stop, num_rows) - first, start - first)]
            padding = np.zeros((stop - start - len(rows), *x.shape[1:]), x.dtype)
            return np.concatenate([rows, padding])

        shape = (padded_rows, *x.shape[1:]) if x.ndim else ()
        return jax.make_array_from_callback(shape, sharding, block)

    return GlobalBatch(jax.tree.map(place, inputs, shardings), num_rows)


def replicated_key(key: jax.Array, mesh: Mesh) -> jax.Array:
    """Returns a key replicated over the mesh; every process must pass the same key."""
    replicated = NamedSharding(mesh, PartitionSpec())
    placed: jax.Array
    if jax.process_count() == 1:
        placed = jax.device_put(key, replicated)
    else:
        # `device_put` to devices of other processes accepts only NumPy arrays.
        data = jax.device_put(np.asarray(jax.random.key_data(key)), replicated)
        placed = jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))
    return placed


def abstract_global_batch(element_spec: PyTree, mesh: Mesh) -> GlobalBatch:
    """Returns the result of `global_batch` for an `element_spec` as ShapeDtypeStructs."""
    num_rows = num_rows_of(element_spec)
    padded_rows = math.ceil(num_rows / mesh.size) * mesh.size

    def struct(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        shape = (padded_rows, *x.shape[1:]) if x.ndim else ()
        sharding = NamedSharding(mesh, batch_spec(x.ndim, mesh.axis_names))
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)

    return GlobalBatch(jax.tree.map(struct, element_spec), num_rows)


@jax.named_scope("inputs")
def drop_padding_rows(batch: GlobalBatch, axis_names: Sequence[str]) -> PyTree:
    """Returns the inputs of a batch without padding rows; call it inside a compiled step."""

    def cut(x: jax.Array) -> jax.Array:
        if x.ndim == 0 or x.shape[0] == batch.num_rows:
            return x
        return constrain(x[: batch.num_rows], (tuple(axis_names),))

    return jax.tree.map(cut, batch.inputs)


@jax.named_scope("inputs")
def reshard_by_rank(
    inputs: PyTree, inputs_split_mapping: InputsSplitMapping, axis_names: Sequence[str]
) -> PyTree:
    """Constrains each input to the mapping's split dims for the input's rank, `map_<rank>d`.

    If the mapping is None, inputs are returned unchanged. Corresponds to Pax's
    `reshard_input_based_on_rank_fn`.

    Raises:
      ConfigError: See `check_inputs_split_mapping`.
    """
    check_inputs_split_mapping(inputs, inputs_split_mapping, axis_names)
    if inputs_split_mapping is None:
        return inputs
    return jax.tree.map(
        lambda x: constrain(x, inputs_split_mapping[f"map_{x.ndim}d"]) if x.ndim else x, inputs
    )


def check_inputs_split_mapping(
    inputs: PyTree, inputs_split_mapping: InputsSplitMapping, axis_names: Sequence[str]
) -> None:
    """Checks that the mapping has a valid entry for every rank among the inputs.

    Raises:
      ConfigError: A rank has no entry (the message shows the entry to add), or an entry is not a
        valid split-dims mapping for its rank.
    """
    for path, x in leaves_with_path(inputs):
        if x.ndim == 0 or inputs_split_mapping is None:
            continue
        key = f"map_{x.ndim}d"
        if key not in inputs_split_mapping:
            example = next((split[:1] for split in inputs_split_mapping.values() if split), None)
            to_split = f"{key!r}: {example} to split it, or " if example else ""
            raise ConfigError(
                f"inputs_split_mapping.{key} is missing; expected an entry for the batch leaf "
                f"{path} of shape {x.shape}, in addition to {sorted(inputs_split_mapping)}. Add "
                f"{to_split}{key!r}: None to leave it as it is."
            )
        split = inputs_split_mapping[key]
        if split is not None:
            setting = f"inputs_split_mapping['{key}']"
            to_partition_spec(split, axis_names, rank=x.ndim, path=setting)


def check_ids(
    inputs: Mapping[str, Any], sizes: Mapping[str, int], where: str, *, first_row: int = 0
) -> None:
    """Checks that the ids in a batch are in the model's range.

    Ids that are too large are rejected even in padding, because an embedding lookup returns NaN for
    them, and NaN spreads to other rows. Negative ids, and all labels, are checked only where
    `weights` are above 0.

    Args:
      inputs: This process's rows of a batch, as NumPy arrays.
      sizes: Maps a leaf's name to its number of valid ids (`Task.num_ids`).
      where: Name of the dataset and the batch, for the message.
      first_row: Index of the first row in the global batch.

    Raises:
      ConfigError: An id is out of range. The message names the dataset, the row and the id.
    """
    for name, size in sizes.items():
        x = np.asarray(inputs.get(name, ()))
        # These two passes are cheap; the rest runs only if they find an invalid id.
        if x.dtype.kind not in "iu" or not x.size or (x.min() >= 0 and x.max() < size):
            continue
        weighs = _weighs(x, inputs.get("weights")) if name in ("ids", "labels") else False
        is_wrong = (x < 0) & weighs | (x >= size) & (weighs if name == "labels" else True)
        for index in np.argwhere(is_wrong)[:1]:
            if name == "segment_pos":
                raise ConfigError(
                    f"{where}: row {first_row + index[0]} of {name} contains {x[tuple(index)]}; "
                    f"expected positions from 0 to {size - 1}, because the model supports {size} "
                    "positions. Shorten the sequences, or increase max_seq_length or max_positions."
                )
            raise ConfigError(
                f"{where}: row {first_row + index[0]} of {name} contains {x[tuple(index)]}; "
                f"expected ids from 0 to {size - 1}, because the model's vocab_size (num_classes "
                f"for a classifier) is {size}. Increase that setting, or fix the data: pad with 0, "
                "and set the weights of padding to 0."
            )


def _weighs(x: np.ndarray, weights: Any) -> Any:
    """Returns a mask, broadcastable to `x`, that is True where the weight is above 0."""
    if weights is None:
        return True
    is_counted = np.asarray(weights) > 0
    if is_counted.shape == x.shape:
        return is_counted
    if is_counted.shape == x.shape[:1]:
        return is_counted.reshape(-1, *(1,) * (x.ndim - 1))
    return True
