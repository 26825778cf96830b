"""Prevents the right padding of prompts from changing caches.

After prefill, each row of the cache must equal the cache of the same prompt without padding.
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
    """Calls the model on T tokens, and restores the cache rows of padding tokens.

    Args:
      model: The model.
      ids: int32 [B, T]. T must be 1 if a layer's cache may store padding.
      positions: int32 [B or 1, T].
      paddings: Float [B, T], 1.0 for padding.
      cache: The cache before these tokens.

    Returns:
      The logits [B, T, V], and the cache after the tokens that are not padding.
    """
    logits, new = rebuilt(model)(ids, positions=positions, paddings=paddings, cache=cache)
    if layers_that_keep_padding(model):
        assert ids.shape[1] == 1, "padding would be stored in the cache"
        new = keep_rows(cache, new, batch_dims(model.init_cache), paddings[:, 0] > 0.5)
    return logits, new


def layers_that_keep_padding(model: Any) -> list[str]:
    """Returns the names of layer classes whose caches may store padding.

    These are classes with `init_cache` that do not declare `cache_skips_padding`; see `BaseLayer`.
    A model that is not an nnx.Module must not store padding; see `Decoder.__call__`.
    """
    classes = {type(layer) for _, layer in layers_of(model)}
    return sorted(
        cls.__name__ for cls in classes if hasattr(cls, "init_cache") and not _skips_padding(cls)
    )


def layers_of(model: Any) -> Iterator[tuple[tuple, nnx.Module]]:
    """Yields (path, layer) for all layers in a model, including models in its attributes.

    For example, a ConditionedDecoder is not an nnx.Module, but has one as an attribute.
    """
    is_module = isinstance(model, nnx.Module)
    for module in [model] if is_module else getattr(model, "__dict__", {}).values():
        if isinstance(module, nnx.Module):
            yield from nnx.compat.iter_modules(module)


def check_has_rows(model: Any) -> None:
    """Checks that cache rows can be restored if the cache may store padding.

    Raises:
      ConfigError: A cache leaf has no batch dim. The message contains the path of the leaf.
    """
    if layers_that_keep_padding(model):
        dims = batch_dims(model.init_cache)
        cache = jax.eval_shape(lambda: model.init_cache(2, 1))
        jax.eval_shape(lambda x: keep_rows(x, x, dims, jnp.zeros((2,), bool)), cache)


def _skips_padding(layer_class: type) -> bool:
    """Returns whether a class declares that its cache does not store padding.

    Overriding `init_cache` or `__call__` in a subclass invalidates the declaration of its base
    class.
    """
    names = {"cache_skips_padding", "init_cache", "__call__"}
    owner = next(cls for cls in layer_class.__mro__ if names & vars(cls).keys())
    return bool(vars(owner).get("cache_skips_padding", False))


@functools.cache
def log_slow_prefill(names: tuple[str, ...]) -> None:
    """Logs once per model that prompts are read a token at a time, and how to avoid this."""
    logging.getLogger(__name__).info(
        "prompts are read one token at a time, because these layers do not declare "
        "cache_skips_padding (docs/how_to_add.md): %s",
        ", ".join(names),
    )
