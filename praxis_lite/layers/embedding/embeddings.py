"""Token embeddings, with Pax's names and numerics."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import export

from praxis_lite.core.errors import require_choice
from praxis_lite.core.sharding.logical_axes import axes_of
from praxis_lite.core.sharding.split_dims import (
    SplitDims,
    constrain,
    num_shards_of,
    to_partition_spec,
    without_axes,
)
from praxis_lite.layers.base.base_layer import BaseLayer, Initializer, xavier
from praxis_lite.layers.base.calls import require_floating, require_positive
from praxis_lite.layers.base.dims import NONE, RESIDUAL, SplitSetting, split_of, splits
from praxis_lite.layers.base.result_types import einsum, rows_at

# B batch, T time, D model dims, V classes.
LOOKUP_STYLES = ("index", "matmul")


class Embedding(BaseLayer):
    """Maps ids to vectors: int [B, T] -> [B, T, D]; its weight is [V, D].

    Args:
      num_classes: V, the number of ids.
      input_dims: D, the size of the vectors.
      lookup_style: "index" or "matmul"; see `lookup`.
      scale_sqrt_depth: Whether to multiply by sqrt(D), as in Vaswani et al. 2017.
      fprop_dtype: Dtype of the vectors and therefore of the following activations.
      weight_init: Initializer of the weight.
      weight_split_dims_mapping: Sharding of [V, D].
      activation_split_dims_mapping: Sharding of the vectors, [B, T, D].
    """

    splits = splits(weight=("vocab", "embed"), activation=RESIDUAL)

    def __init__(
        self,
        num_classes: int,
        input_dims: int,
        *,
        lookup_style: str = "index",
        scale_sqrt_depth: bool = False,
        fprop_dtype: jnp.dtype = jnp.float32,
        weight_init: Initializer = xavier,
        rngs: nnx.Rngs,
        weight_split_dims_mapping: SplitSetting = None,
        activation_split_dims_mapping: SplitSetting = None,
    ):
        require_positive(self, num_classes=num_classes, input_dims=input_dims)
        require_floating(self, fprop_dtype=fprop_dtype)
        require_choice(f"{type(self).__name__}.lookup_style", lookup_style, LOOKUP_STYLES)
        V, D = self.dims(num_classes, input_dims)
        self.emb_var = self.weight((V, D), init=weight_init, matrix=NONE, rngs=rngs)
        self.weight_split_dims_mapping = split_of((V, D))
        self.lookup_style = lookup_style
        self.scale = input_dims**0.5 if scale_sqrt_depth else 1.0
        self.fprop_dtype = fprop_dtype

    def __call__(self, ids: jax.Array) -> jax.Array:
        split = self.activation_split_dims_mapping
        embs = lookup(
            self.emb_var[...],
            ids,
            self.weight_split_dims_mapping,
            self.lookup_style,
            self.fprop_dtype,
            split,
        )
        return constrain_embeddings(embs * self.scale, split, self.weight_split_dims_mapping)


def lookup(
    table_VD: jax.Array,
    ids: jax.Array,
    weight_split_dims_mapping: SplitDims,
    lookup_style: str,
    dtype: jnp.dtype,
    activation_split_dims_mapping: SplitDims,
) -> jax.Array:
    """Looks up the rows of a table at `ids`, [...] -> [..., D].

    Args:
      table_VD: The embedding table.
      ids: Int [...]. For an id outside the table, "index" returns NaN (in Pax, the last row), and
        "matmul" returns zeros.
      weight_split_dims_mapping: Sharding of the table, [V, D].
      lookup_style: "index" gathers rows; "matmul" multiplies one-hot vectors [..., V] by the table.
      dtype: Dtype of the result.
      activation_split_dims_mapping: Sharding of the embeddings, [..., D].
    """
    table_split = (*(weight_split_dims_mapping or ()), None, None)[:2]
    if lookup_style == "index":
        split = _columns_split(table_VD, ids, table_split, activation_split_dims_mapping)
        if split is None:
            # Gather the columns. Otherwise XLA would replicate the result before resharding it from
            # columns to the batch.
            table_VD = constrain(table_VD, (table_split[0], None))
        else:
            ids = constrain(ids, split[:-1])
        # Cast after the lookup, so that the gradients for a row are summed in float32.
        return constrain(rows_at(table_VD, ids).astype(dtype), split)
    one_hot = jax.nn.one_hot(ids, table_VD.shape[0], dtype=dtype)
    table_VD = constrain(table_VD, (table_split[0], None))
    return einsum("...v,vd->...d", one_hot, table_VD.astype(dtype))


def _columns_split(
    table_VD: jax.Array, ids: jax.Array, table_split: SplitDims, activation_split: SplitDims
) -> SplitDims:
    """Returns the sharding of [..., D] if each device should read its columns for all tokens.

    All-to-alls then reshard the result by tokens. If a device has fewer tokens than table rows,
    this is cheaper than gathering the table and scattering its gradient. Returns None if a device
    has more tokens than rows, or if columns are not sharded.
    """
    mesh, (class_split, dim_split) = jax.sharding.get_abstract_mesh(), table_split or (None, None)
    num_parts = num_shards_of(dim_split)
    # In an exported function, the number of tokens may be symbolic.
    if num_parts == 1 or export.is_symbolic_dim(ids.size):
        return None
    spec = to_partition_spec(activation_split or (), mesh.axis_names, rank=ids.ndim + 1)
    axes = [
        axis
        for entry in to_partition_spec(table_split or (), mesh.axis_names)
        for axis in axes_of(entry)
    ]
    split = without_axes(spec, axes)[:-1]
    num_rows = table_VD.shape[0] / num_shards_of(class_split)
    num_read = ids.size / math.prod(num_shards_of(entry) for entry in split)
    return (*split, dim_split) if num_read / num_parts < num_rows else None


def constrain_embeddings(
    embs: jax.Array, activation_split_dims_mapping: SplitDims, weight_split_dims_mapping: SplitDims
) -> jax.Array:
    """Constrains the sharding of embeddings [B, T, D], in the cheapest order for XLA.

    Args:
      embs: Result of `lookup`.
      activation_split_dims_mapping: Sharding of the embeddings.
      weight_split_dims_mapping: Sharding of the table, [V, D].
    """
    split, mesh = activation_split_dims_mapping, jax.sharding.get_abstract_mesh()
    if split is None or mesh.empty:
        return embs
    spec = to_partition_spec(split, mesh.axis_names, rank=embs.ndim)
    table = (*(weight_split_dims_mapping or ()), None, None)[:2]
    classes, columns = to_partition_spec(table, mesh.axis_names)
    if classes is not None:
        # First shard only the batch, because batch or time may be sharded over the same axis as V.
        # XLA then implements the second constraint with a reduce-scatter instead of gathering the
        # table.
        embs = constrain(embs, tuple(without_axes(spec[:1], axes_of(classes))))
    elif embs.ndim == 3 and set(axes_of(columns)) & set(axes_of(spec[1])):
        # Reshard the batch first, then move axes from columns to time. Otherwise XLA would gather
        # the vectors of all tokens.
        (remaining,) = without_axes((columns,), axes_of(spec[0]))
        embs = constrain(embs, (spec[0], None, remaining))
    return constrain(embs, split)
