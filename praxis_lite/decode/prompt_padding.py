"""Keeps the right padding of prompts out of the caches of layers that do not skip it themselves.

The invariant: after its prompt a row's cache is the one that the prompt alone gives.
"""

import functools
import logging
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from praxis_lite.decode.cache_rows import batch_dims, keep_rows
from praxis_lite.layers.base.variables import rebuilt

__all__ = ("check_has_rows",)

# B batch, T time, V classes.
PyTree = Any


def read(
    model: Any, ids: jax.Array, positions: jax.Array, paddings: jax.Array, cache: PyTree
) -> tuple[jax.Array, PyTree]:
    """Returns the logits [B, T, V], and the cache updated by the tokens that are not padding.

    T is 1 where a layer of the model has a cache that may keep padding.

    Args:
      ids: int32 [B, T].
      positions: int32 [B or 1, T].
      paddings: [B, T], 1.0 for padding.
    """
    logits, new = rebuilt(model)(ids, positions=positions, paddings=paddings, cache=cache)
    if layers_that_keep_padding(model):
        assert ids.shape[1] == 1, "padding would stay in the cache"
        new = keep_rows(cache, new, batch_dims(model.init_cache), paddings[:, 0] > 0.5)
    return logits, new


def layers_that_keep_padding(model: Any) -> list[str]:
    """Returns the classes of layers whose caches may have padding in them after a call.

    They are the layers with `init_cache` that do not declare `cache_skips_padding`, see
    `BaseLayer`. A model that is not an nnx.Module itself leaves padding out, as `Decoder.__call__`
    asks of it.
    """
    classes = {type(layer) for _, layer in layers_of(model)}
    return sorted(x.__name__ for x in classes if hasattr(x, "init_cache") and not _declares(x))


def layers_of(model: Any) -> Iterator[tuple[tuple, nnx.Module]]:
    """Yields the path and the layer of each layer of a model, or of the models of an adapter.

    An adapter, such as a ConditionedDecoder, is an object with an nnx.Module as an attribute.
    """
    is_module = isinstance(model, nnx.Module)
    for module in [model] if is_module else getattr(model, "__dict__", {}).values():
        if isinstance(module, nnx.Module):
            yield from nnx.compat.iter_modules(module)


def check_has_rows(model: Any) -> None:
    """Checks that each row of the model's cache can be kept, where padding may get into it.

    Raises:
      ConfigError: a leaf has no dim of the batch; names its path.
    """
    if layers_that_keep_padding(model):
        dims = batch_dims(model.init_cache)
        cache = jax.eval_shape(lambda: model.init_cache(2, 1))
        jax.eval_shape(lambda x: keep_rows(x, x, dims, jnp.zeros((2,), bool)), cache)


def _declares(layer_class: type) -> bool:
    """Returns the declared value; a subclass that overrides a method must declare it again."""
    for owner in layer_class.__mro__:
        if "cache_skips_padding" in vars(owner):
            return bool(owner.cache_skips_padding)
        if {"init_cache", "__call__"} & vars(owner).keys():
            return False
    return False


@functools.cache
def tell_of_slow_prompts(names: tuple[str, ...]) -> None:
    """Logs once that prompts are read a token at a time, and what the layer can declare."""
    logging.getLogger("praxis_lite").info(
        "prompts are read a token at a time, because %s does not declare cache_skips_padding "
        "(docs/how_to_add.md)", ", ".join(names),
    )
