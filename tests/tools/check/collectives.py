"""A model whose user has written its collectives by hand, each of which can be broken in one place.

B rows, D 6 inputs, H 8 hidden features, C 3 classes. Rows are split over "data", features over
"mdl".
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

psum, pmean, pmax = jax.lax.psum, jax.lax.pmean, jax.lax.pmax
all_gather = functools.partial(jax.lax.all_gather, tiled=True)
psum_scatter = functools.partial(jax.lax.psum_scatter, tiled=True)
all_to_all = functools.partial(jax.lax.all_to_all, tiled=True)
ppermute, axis_index = jax.lax.ppermute, jax.lax.axis_index


def init(key):
    """Returns the weights, whole."""
    keys = jax.random.split(key, 4)
    shapes = {"gathered": (8, 6), "summed": (8, 8), "scattered": (8, 8), "head": (8, 3)}
    return {
        name: jax.random.normal(key, shape) * shape[0] ** -0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def logits(weights, x_BD):
    """Returns logits [B, 3]."""
    features = jax.shard_map(
        _features,
        in_specs=(P("data", None), P("mdl", None), P("mdl", None), P("mdl", None)),
        out_specs=P("data", "mdl"),
        check_vma=False,
    )(x_BD, weights["gathered"], weights["summed"], weights["scattered"])
    return features @ weights["head"]


def _features(x_BD, gathered_hD, summed_hH, scattered_hH):
    """Returns a device's features [b, h] of its rows."""
    w_HD = all_gather(gathered_hD, "mdl", axis=0)
    x_BH = jnp.tanh(x_BD @ w_HD.T)
    # Of all features: a block of them in another's place is not made up for by the cut below.
    x_BH = x_BH / (1.0 + jnp.mean(jnp.abs(x_BH), axis=1))[:, None]
    part = x_BH.shape[1] // jax.lax.axis_size("mdl")
    x_Bh = jax.lax.dynamic_slice_in_dim(x_BH, axis_index("mdl") * part, part, axis=1)
    # Each row is centered over its features.
    x_Bh = x_Bh - pmean(jnp.mean(x_Bh, axis=1), "mdl")[:, None]
    # A softmax over features that are split.
    top_B = pmax(jax.lax.stop_gradient(jnp.max(x_Bh, axis=1)), "mdl")
    weights_Bh = jnp.exp(x_Bh - top_B[:, None])
    x_Bh = x_Bh + weights_Bh / psum(jnp.sum(weights_Bh, axis=1), "mdl")[:, None]
    x_BH = jnp.tanh(psum(x_Bh @ summed_hH, "mdl"))
    x_Bh = jax.lax.dynamic_slice_in_dim(x_BH, axis_index("mdl") * part, part, axis=1)
    x_Bh = psum_scatter(x_Bh @ scattered_hH, "mdl", scatter_dimension=1)
    # Each feature sees the one before it, on the device before if need be.
    size = jax.lax.axis_size("mdl")
    before_B1 = ppermute(x_Bh[:, -1:], "mdl", [(i, (i + 1) % size) for i in range(size)])
    x_Bh = x_Bh + 0.5 * jnp.concatenate([before_B1, x_Bh[:, :-1]], axis=1)
    # All features of some rows, a sum along them that begins at the first, and back.
    x_bH = all_to_all(x_Bh, "mdl", split_axis=0, concat_axis=1)
    x_bH = jnp.cumsum(x_bH, axis=1) / x_bH.shape[1]
    return all_to_all(x_bH, "mdl", split_axis=1, concat_axis=0)
