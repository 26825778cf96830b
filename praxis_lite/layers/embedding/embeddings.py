"""Token embedding. Names and numerics are Pax's."""

import jax
import jax.numpy as jnp
from flax import nnx

from praxis_lite.errors import require_choice
from praxis_lite.layers.base_layer import (
    BaseLayer,
    Initializer,
    require_floating,
    require_positive,
    xavier,
)
from praxis_lite.sharding import SplitDims, constrain
from praxis_lite.sharding.split_dims import DimSplit

# B batch, T time, D model dims, V classes.
LOOKUP_STYLES = ("index", "matmul")


class Embedding(BaseLayer):
    """Returns a vector per id: int [B, T] -> [B, T, input_dims]; its weight is [V, D].

    Args:
      lookup_style: how rows are read, see `lookup`.
      scale_sqrt_depth: multiply by sqrt(input_dims), as Vaswani et al. 2017.
      fprop_dtype: of the vectors, and so of the computation behind them.
      weight_split_dims_mapping: of [V, D].
      activation_split_dims_mapping: of the vectors, [B, T, D].
    """

    def __init__(
        self,
        num_classes: int,
        input_dims: int,
        *,
        lookup_style: str = "index",
        scale_sqrt_depth: bool = False,
        fprop_dtype: jnp.dtype = jnp.float32,
        weight_init: Initializer = xavier,
        weight_split_dims_mapping: SplitDims = None,
        activation_split_dims_mapping: SplitDims = None,
        rngs: nnx.Rngs,
    ):
        require_positive(self, num_classes=num_classes, input_dims=input_dims)
        require_floating(self, fprop_dtype=fprop_dtype)
        require_choice(f"{type(self).__name__}.lookup_style", lookup_style, LOOKUP_STYLES)
        self.emb_var = self.weight(
            (num_classes, input_dims), weight_split_dims_mapping, init=weight_init, rngs=rngs
        )
        self.class_split = next(iter(weight_split_dims_mapping or ()), None)
        self.lookup_style = lookup_style
        self.scale = input_dims**0.5 if scale_sqrt_depth else 1.0
        self.fprop_dtype = fprop_dtype
        self.activation_split_dims_mapping = activation_split_dims_mapping

    def __call__(self, ids: jax.Array) -> jax.Array:
        table_VD = self.emb_var[...]
        embs = lookup(table_VD, ids, self.class_split, self.lookup_style, self.fprop_dtype)
        return placed(embs * self.scale, self.activation_split_dims_mapping)


def lookup(
    table_VD: jax.Array, ids: jax.Array, class_split: DimSplit, lookup_style: str, dtype: jnp.dtype
) -> jax.Array:
    """Returns the rows of `table_VD` at `ids`, [...] -> [..., D], in `dtype`.

    "matmul" multiplies a one-hot [..., V] by the table. An id that has no row gives NaN by "index",
    which shows, and zeros by "matmul"; Pax's "index" takes the last row.
    """
    # Whole rows: from rows that are split XLA would go to the batch's split by way of full copies.
    table_VD = constrain(table_VD, (class_split, None))
    if lookup_style == "index":
        # Cast after it: the gradients of a row, one for each time it is read, are added in float32.
        return jnp.take(table_VD, ids, axis=0).astype(dtype)
    one_hot = jax.nn.one_hot(ids, table_VD.shape[0], dtype=dtype)
    return jnp.einsum("...v,vd->...d", one_hot, table_VD.astype(dtype))


def placed(embs: jax.Array, activation_split_dims_mapping: SplitDims) -> jax.Array:
    """Returns embeddings [B, T, D] in their layout."""
    split = activation_split_dims_mapping
    # By way of a split of the batch alone: time may split over the axis that splits V. So each
    # device adds up its rows for all times and keeps its part; else XLA would gather the table.
    return constrain(constrain(embs, None if split is None else tuple(split)[:1]), split)
