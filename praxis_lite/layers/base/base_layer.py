"""The base of all layers: declarations of weights, and splits that travel with them."""

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from praxis_lite.core.errors import require_choice
from praxis_lite.core.sharding.split_dims import SplitDims
from praxis_lite.layers.base.calls import ConstructorSignature, checked_and_named, with_settings
from praxis_lite.layers.base.dims import (
    CLASSES,
    NONE,
    SPLIT,
    Dim,
    Matrix,
    checked_mapping,
    dims_of,
    names_of,
    split_of,
)
from praxis_lite.layers.base.result_types import broadcast_beside
from praxis_lite.layers.initializers import EinsumXavier, WeightInit

Initializer = Callable[[jax.Array, tuple[int, ...], Any], jax.Array] | EinsumXavier

xavier = WeightInit.Xavier()  # Pax's default.
zeros = jax.nn.initializers.zeros
ones = jax.nn.initializers.ones


class BaseLayer(nnx.Module):
    """A Flax NNX module, used as a pytree, whose weights declare how they split.

    Subclasses create weights with `self.weight` and sublayers in the constructor, and compute in
    `__call__`. They take keys and caches as arguments and return new ones: nothing mutates. What
    `__call__` and public methods compute carries the layer's path in the compiled program.

    Raises:
      ConfigError: a setting is out of its range, or does not go with another; names the class and
        the setting, before anything compiles. Or a method got a keyword that it does not know;
        names the nearest.
    """

    __signature__ = ConstructorSignature()
    # Its settings that say how arrays split, as `splits` returns them. They are arguments of the
    # constructor, which need not name them, and attributes before it begins.
    splits: Mapping[str, tuple[str | None, ...]] = {}
    # Its settings that a preset gives, each with the name of the value there.
    preset_settings: Mapping[str, str] = {}
    # By template, such as "softmax_tpl": splits of the layers that are made of it, before theirs.
    template_splits: Mapping[str, Mapping[str, tuple[str | None, ...]]] = {}
    # What of it is more than a sum over rows, such as "batch statistics"; for --mode=check.
    couples_rows: str | None = None
    # Of it, what lets a token depend on later ones of its row, such as "slots that tokens compete
    # for"; None in attention, whose mask says it.
    couples_tokens: str | None = None
    # True: a call with a cache leaves the tokens of `paddings` out of it, for any number of tokens.
    # False: decoding reads prompts a token at a time, and restores the cache of rows that have
    # ended. A subclass with a new `__call__` or `init_cache` declares it again.
    cache_skips_padding: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, member in list(vars(cls).items()):
            is_public = name == "__call__" or not name.startswith("_")
            if is_public and isinstance(member, FunctionType):
                setattr(cls, name, checked_and_named(member))
        has_changed = {"__init__", "splits"} & vars(cls).keys()
        if has_changed and isinstance(cls.__init__, FunctionType):
            cls.__init__ = with_settings(cls.__init__, cls.splits, _take)

    def dims(self, *sizes: int, of: str = "weight") -> tuple[Dim, ...]:
        """Returns sizes as the dims of a setting, such as `weight_split_dims_mapping`.

        They have the names that the layer declares in `splits`, unless a parent gave them others,
        and its split, or without one that of the parent. Weights that are made of them, here or in
        layers that they are given to, then split so.

        Raises:
          ConfigError: there is no such setting, or what it says does not fit the sizes.
        """
        setting = f"{of}{SPLIT}"
        require_choice(f"{type(self).__name__}.dims: the setting", setting, self.splits)
        return dims_of(
            sizes, self.splits[setting], getattr(self, setting), f"{type(self).__name__}.{setting}"
        )

    def weight(
        self,
        shape: tuple[int, ...],
        split_dims_mapping: SplitDims = None,
        *,
        init: Initializer = xavier,
        dtype: Any = jnp.float32,
        matrix: Matrix | None = None,
        rngs: nnx.Rngs,
    ) -> nnx.Param:
        """Returns a trainable weight drawn by `init` at its logical, unpadded shape.

        Args:
          shape: sizes, or dims of `self.dims`.
          split_dims_mapping: how it splits; None: as its dims say.
          matrix: its dims that make a matrix, for optimizers: a result of `matrix_of`, or NONE for
            no matrix; None: a weight of two dims is one. A weight with a dim of classes never is.
        """
        if split_dims_mapping is None:
            split_dims_mapping = split_of(shape)
        if isinstance(init, EinsumXavier):
            init = init.for_dims(*(matrix or Matrix((0,), (1,))))
        names = names_of(shape)
        if CLASSES in names:  # It embeds, or makes logits.
            matrix = NONE
        value = init(rngs.params(), tuple(map(int, shape)), dtype)
        # Our own metadata key: Flax applies its own (`sharding`, `out_sharding`) eagerly and raises
        # on a dim that does not divide.
        return nnx.Param(
            value, split_dims_mapping=split_dims_mapping, dim_names=names, matrix=matrix
        )


def _take(layer: BaseLayer, given: Mapping[str, Any]) -> None:
    """Sets the attributes of a layer's splits; those of a base's constructor may be set already."""
    for name, dims in layer.splits.items():
        if name in given or not hasattr(layer, name):
            setting = f"{type(layer).__name__}.{name}"
            setattr(layer, name, checked_mapping(setting, given.get(name), dims))


def broadcast_as(weight: jax.Array, like: jax.Array) -> jax.Array:
    """Returns `weight` (float32) in the shape and dtype of `like`."""
    # Cast after the broadcast: its gradient, a sum over all tokens for a bias, is then summed in
    # float32. In bfloat16 it would stop growing, for 256 + 1 is 256 there.
    return broadcast_beside(weight, like).astype(like.dtype)


def pad_to(x: jax.Array, length: int, dim: int = 0, **settings: Any) -> jax.Array:
    """Returns `x` with zeros at the end of a dim, or as `settings` of `jnp.pad` say."""
    missing = length - x.shape[dim]
    widths = [(0, missing if d == dim else 0) for d in range(x.ndim)]
    return jnp.pad(x, widths, **settings) if missing else x


def pad_to_multiple(x: jax.Array, size: int, dim: int = 0, **settings: Any) -> jax.Array:
    """Returns `x`, `pad_to` to the next multiple of `size`."""
    return pad_to(x, -(-x.shape[dim] // size) * size, dim, **settings)
