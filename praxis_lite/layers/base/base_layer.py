"""BaseLayer: the base class of layers, which declare their weights and the weights' sharding."""

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
from praxis_lite.layers.base.result_types import broadcast_typed_like
from praxis_lite.layers.initializers import EinsumXavier, WeightInit

Initializer = Callable[[jax.Array, tuple[int, ...], Any], jax.Array] | EinsumXavier

xavier = WeightInit.Xavier()  # The default in Pax.
zeros = jax.nn.initializers.zeros
ones = jax.nn.initializers.ones


class BaseLayer(nnx.Module):
    """A Flax NNX module, used as a pytree, whose weights declare how they are sharded.

    Subclasses create weights (with `self.weight`) and sublayers in the constructor, and compute in
    `__call__`. Keys and caches are arguments and results; nothing is mutated. In HLO, operations
    from `__call__` and from public methods have the layer's path as their name scope.

    Raises:
      ConfigError: A setting is out of range or conflicts with another setting, or a method
        received an unknown keyword. Settings are checked before anything compiles.
    """

    __signature__ = ConstructorSignature()
    # Sharding settings of the layer, as returned by `splits`. They become keyword arguments of the
    # constructor, and are set as attributes before the constructor runs. Constructors and classes
    # declare them only for type checkers; the two most common ones are declared here.
    splits: Mapping[str, tuple[str | None, ...]] = {}
    weight_split_dims_mapping: SplitDims
    activation_split_dims_mapping: SplitDims
    # Maps the name of a setting to the name of the value that a sharding preset has for it.
    preset_settings: Mapping[str, str] = {}
    # Maps templates, such as "softmax_tpl", to settings that override the settings of the layers
    # that the templates build.
    template_splits: Mapping[str, Mapping[str, tuple[str | None, ...]]] = {}
    # The mechanism that couples examples in a batch, such as "batch statistics", for
    # `praxis check`.
    couples_rows: str | None = None
    # The mechanism by which a token can depend on later tokens, such as "slots that tokens compete
    # for". None if there is no such mechanism, or if the mechanism is attention, which has masks.
    couples_tokens: str | None = None
    # Whether calls with a cache can skip any number of tokens that `paddings` marks. If False,
    # decoding reads prompts one token at a time, and restores the cache of finished sequences. A
    # subclass that overrides `__call__` or `init_cache` must declare this again.
    cache_skips_padding: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, member in list(vars(cls).items()):
            is_public = name == "__call__" or not name.startswith("_")
            if is_public and isinstance(member, FunctionType):
                setattr(cls, name, checked_and_named(member))
        changes_init = {"__init__", "splits"} & vars(cls).keys()
        if changes_init and isinstance(cls.__init__, FunctionType):
            # Replaces a method of a class that is being created.
            cls.__init__ = with_settings(  # type: ignore[method-assign]
                cls.__init__, cls.splits, _set_sharding_settings
            )

    @property
    def has_types(self) -> bool:
        """Whether JAX can infer the types of the layer's results over Explicit mesh axes.

        If False, the layer is computed over Auto axes, and dims of its results that are also dims
        of its first argument are typed like these. A subclass may set `has_types = False`.
        """
        return True

    def dims(self, *sizes: int, setting_prefix: str = "weight") -> tuple[Dim, ...]:
        """Converts sizes to `Dim`s with the names and sharding of a setting.

        The names are those declared in `splits`, unless a parent has named the dims. If the setting
        is None, the parent's sharding applies. Weights created from these dims, here or in
        sublayers, are sharded accordingly.

        Args:
          sizes: Sizes, or `Dim`s from a parent.
          setting_prefix: "weight" for `weight_split_dims_mapping`, for example.

        Raises:
          ConfigError: The layer has no such setting, or the setting does not match the sizes.
        """
        setting = f"{setting_prefix}{SPLIT}"
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
        """Returns a trainable weight initialized at its logical (unpadded) shape.

        Args:
          shape: Sizes, or results of `self.dims`.
          split_dims_mapping: Sharding of the weight. If None, it is sharded like its dims.
          init: Initializer.
          dtype: Dtype of the stored weight.
          matrix: The dims that form a matrix, for optimizers: a result of `matrix_of`, or NONE. If
            None, a weight with two dims is a matrix. A weight with a classes dim is never a matrix.
          rngs: The random streams for initialization.
        """
        if split_dims_mapping is None:
            split_dims_mapping = split_of(shape)
        if isinstance(init, EinsumXavier):
            init = init.for_dims(*(matrix or Matrix((0,), (1,))))
        names = names_of(shape)
        if CLASSES in names:  # An embedding, or the weight of logits.
            matrix = NONE
        value = init(rngs.params(), tuple(map(int, shape)), dtype)
        # Do not use Flax's metadata (`sharding`, `out_sharding`), which Flax applies eagerly and
        # rejects for dims that are not evenly divisible.
        return nnx.Param(
            value, split_dims_mapping=split_dims_mapping, dim_names=names, matrix=matrix
        )


def _set_sharding_settings(layer: BaseLayer, given: Mapping[str, Any]) -> None:
    """Sets the sharding settings of a layer as attributes, unless a base class has done so."""
    for name, dims in layer.splits.items():
        if name in given or not hasattr(layer, name):
            setting = f"{type(layer).__name__}.{name}"
            setattr(layer, name, checked_mapping(setting, given.get(name), dims))


def broadcast_as(weight: jax.Array, like: jax.Array) -> jax.Array:
    """Broadcasts `weight` (float32) to the shape of `like` and casts it to the dtype of `like`."""
    # Cast after the broadcast, so that gradients, such as the sum over all tokens for a bias, are
    # summed in float32. A bfloat16 sum would stop growing, because 256 + 1 is 256 in bfloat16.
    return broadcast_typed_like(weight, like).astype(like.dtype)


def pad_to(x: jax.Array, length: int, dim: int = 0, **settings: Any) -> jax.Array:
    """Pads the end of a dim of `x` to `length`; passes `settings` to `jnp.pad`."""
    missing = length - x.shape[dim]
    widths = [(0, missing if d == dim else 0) for d in range(x.ndim)]
    return jnp.pad(x, widths, **settings) if missing else x


def pad_to_multiple(x: jax.Array, size: int, dim: int = 0, **settings: Any) -> jax.Array:
    """Pads the end of a dim of `x` to the next multiple of `size`."""
    return pad_to(x, -(-x.shape[dim] // size) * size, dim, **settings)
