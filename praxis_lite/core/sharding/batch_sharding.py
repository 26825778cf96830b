"""How a batch reaches the devices: checked, split over the mesh at entry, resharded inside."""

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
    "GlobalBatch", "InputsSplitMapping", "abstract_global_batch", "batch_spec", "global_batch",
    "is_true_row", "num_rows_of", "replicated_key", "reshard_by_rank",
)

PyTree = Any
# Split dims of a batch's arrays by their rank: "map_1d", "map_2d", ...; None: not resharded.
InputsSplitMapping = Mapping[str, SplitDims] | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GlobalBatch:
    """A batch on the devices: rows padded to a multiple of the devices; the number of real rows.

    Attributes:
      inputs: arrays [padded rows, ...] split on dim 0 over all mesh axes; scalars replicated.
      num_rows: of real rows. Static, so that the padding is sliced off at no cost.
    """

    inputs: PyTree
    num_rows: int = dataclasses.field(metadata={"static": True})


def batch_spec(rank: int, axis_names: Sequence[str]) -> PartitionSpec:
    """Returns the entry spec of a batch leaf: dim 0 over the whole mesh; of a scalar, replicated.

    Pax's `shard_on_batch_dim_partition_spec`.
    """
    return PartitionSpec(tuple(axis_names), *[None] * (rank - 1)) if rank else PartitionSpec()


def num_rows_of(inputs: PyTree) -> int:
    """Returns the rows (dim 0) that all leaves of a batch agree on; 0 if all are scalars.

    Raises:
      ConfigError: the leaves disagree; names each with its shape.
    """
    rows = {path: leaf.shape for path, leaf in leaves_with_path(inputs) if leaf.ndim}
    if len({shape[0] for shape in rows.values()}) > 1:
        result = ", ".join(f"{name} {shape}" for name, shape in rows.items())
        raise ConfigError(
            f"The leaves of a batch disagree on the number of rows (the first dim): {result}. Make "
            "the input pipeline give every leaf the same first dim."
        )
    return next(iter(rows.values()))[0] if rows else 0


def is_true_row(inputs: Mapping[str, Any]) -> Any:
    """Returns bool [B]: True for rows with a weight above zero, False for padding.

    Args:
      inputs: arrays of NumPy or JAX; without "weights" every row is real.
    """
    num_rows = num_rows_of(inputs)
    if "weights" not in inputs:
        return np.ones(num_rows, bool)
    return (inputs["weights"].reshape(num_rows, -1) != 0).any(axis=1)


def process_rows(num_rows: int, mesh: Mesh, process_index: int | None = None) -> slice:
    """Returns the rows of a batch that a process feeds: those that its devices hold.

    The batch is padded to a multiple of the devices and split over all of them in the mesh's
    order, so a process may hold fewer rows than another, or nothing. Where its devices do not
    follow each other in that order, the rows in between are in the slice too.

    Args:
      process_index: None: this process.
    """
    index = jax.process_index() if process_index is None else process_index
    rows_per_device = math.ceil(num_rows / mesh.size)
    places = [place for place, item in enumerate(mesh.devices.flat) if item.process_index == index]
    if not places:
        return slice(0, 0)
    start, stop = places[0] * rows_per_device, (places[-1] + 1) * rows_per_device
    return slice(min(start, num_rows), min(stop, num_rows))


def global_batch(inputs: PyTree, mesh: Mesh, num_rows: int | None = None) -> GlobalBatch:
    """Returns a process's part of a batch as global arrays over `mesh`, padded with zero rows.

    Args:
      inputs: NumPy arrays: the rows `process_rows(num_rows, mesh)`.
      mesh: all its axes split the rows.
      num_rows: of the global batch; None: this process holds all of them.

    Raises:
      ConfigError: the leaves disagree on their rows.
    """
    held = num_rows_of(inputs)
    num_rows = held if num_rows is None else num_rows
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
    first = process_rows(num_rows, mesh).start

    def place(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
        def block(index: tuple) -> np.ndarray:
            if not index:
                return x
            start, stop, _ = index[0].indices(padded_rows)
            rows = x[start - first : max(min(stop, num_rows) - first, start - first)]
            filler = np.zeros((stop - start - len(rows), *x.shape[1:]), x.dtype)
            return np.concatenate([rows, filler])

        shape = (padded_rows, *x.shape[1:]) if x.ndim else ()
        return jax.make_array_from_callback(shape, sharding, block)

    return GlobalBatch(jax.tree.map(place, inputs, shardings), num_rows)


def replicated_key(key: jax.Array, mesh: Mesh) -> jax.Array:
    """Returns a JAX key on every device of the mesh; the same key is given in every process."""
    replicated = NamedSharding(mesh, PartitionSpec())
    if jax.process_count() == 1:
        return jax.device_put(key, replicated)
    # `device_put` of an array to devices of other processes is for NumPy arrays alone.
    data = jax.device_put(np.asarray(jax.random.key_data(key)), replicated)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))


def abstract_global_batch(element_spec: PyTree, mesh: Mesh) -> GlobalBatch:
    """Returns the result of `global_batch` for batches of `element_spec`, as shapes."""
    num_rows = num_rows_of(element_spec)
    padded_rows = math.ceil(num_rows / mesh.size) * mesh.size

    def struct(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        shape = (padded_rows, *x.shape[1:]) if x.ndim else ()
        sharding = NamedSharding(mesh, batch_spec(x.ndim, mesh.axis_names))
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)

    return GlobalBatch(jax.tree.map(struct, element_spec), num_rows)


@jax.named_scope("inputs")
def true_rows(batch: GlobalBatch, axis_names: Sequence[str]) -> PyTree:
    """Returns the batch's inputs without the padding rows, in a compiled step."""

    def cut(x: jax.Array) -> jax.Array:
        if x.ndim == 0 or x.shape[0] == batch.num_rows:
            return x
        return constrain(x[: batch.num_rows], (tuple(axis_names),))

    return jax.tree.map(cut, batch.inputs)


@jax.named_scope("inputs")
def reshard_by_rank(
    inputs: PyTree, inputs_split_mapping: InputsSplitMapping, axis_names: Sequence[str]
) -> PyTree:
    """Returns the inputs, each constrained by the entry `map_<rank>d` of the mapping, if any.

    Pax's `reshard_input_based_on_rank_fn`. Raises as `check_inputs_split_mapping`.
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
    """Checks that every leaf's rank has an entry, and that the entries fit.

    Raises:
      ConfigError: a rank has no entry (names the leaf, its shape, the key to add), or an entry is
        not a split-dims mapping for it.
    """
    for path, x in leaves_with_path(inputs):
        if x.ndim == 0 or inputs_split_mapping is None:
            continue
        key = f"map_{x.ndim}d"
        if key not in inputs_split_mapping:
            of_rows = next((split[:1] for split in inputs_split_mapping.values() if split), None)
            raise ConfigError(
                f"inputs_split_mapping.{key} is missing: the batch leaf {path} of shape {x.shape} "
                f"needs it, and the mapping has {sorted(inputs_split_mapping)}. Add "
                f"{key!r}: {of_rows}, or None to leave the array as it comes."
            )
        if inputs_split_mapping[key] is not None:
            setting = f"inputs_split_mapping['{key}']"
            to_partition_spec(inputs_split_mapping[key], axis_names, rank=x.ndim, path=setting)


def check_ids(
    inputs: Mapping[str, Any], sizes: Mapping[str, int], where: str, *, first_row: int = 0
) -> None:
    """Checks that the integers of a batch are ids that its model has.

    An id that is too large is always refused: an embedding returns NaN for it, which spreads.
    Labels and negative ids are checked only where `weights` are above 0: others are padding.

    Args:
      inputs: the rows that this process has of a batch, as NumPy arrays.
      sizes: how many ids there are, by the leaf's name (`Task.num_ids`).
      where: the dataset and the batch, for the message.
      first_row: the number in the whole batch of the first row here.

    Raises:
      ConfigError: names the dataset, the row and the value.
    """
    for name, size in sizes.items():
        x = np.asarray(inputs.get(name, ()))
        # Two passes over a few integers: what follows is for what one of them has found.
        if x.dtype.kind not in "iu" or not x.size or (x.min() >= 0 and x.max() < size):
            continue
        weighs = _weighs(x, inputs.get("weights")) if name in ("ids", "labels") else False
        is_wrong = (x < 0) & weighs | (x >= size) & (weighs if name == "labels" else True)
        for place in np.argwhere(is_wrong)[:1]:
            if name == "segment_pos":
                raise ConfigError(
                    f"{where}: row {first_row + place[0]} of {name} has {x[tuple(place)]}; wanted "
                    f"are positions from 0 to {size - 1}, for the model has {size}. Shorten the "
                    "sequences, or give it more (max_seq_length, max_positions)."
                )
            raise ConfigError(
                f"{where}: row {first_row + place[0]} of {name} has {x[tuple(place)]}; wanted are "
                f"ids from 0 to {size - 1}, for the model's vocab_size is {size} (num_classes of a "
                "classifier). Enlarge it, or mend the data: pad with 0, and give what is to count "
                "for nothing a weight of 0."
            )


def _weighs(x: np.ndarray, weights: Any) -> Any:
    """Returns where the ids `x` have a weight above 0, to be broadcast to their shape."""
    if weights is None:
        return True
    is_counted = np.asarray(weights) > 0
    if is_counted.shape == x.shape:
        return is_counted
    if is_counted.shape == x.shape[:1]:
        return is_counted.reshape(-1, *(1,) * (x.ndim - 1))
    return True
