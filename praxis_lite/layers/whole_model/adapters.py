"""LoRA (arXiv:2106.09685): dense layers that learn a product of two thin matrices beside w.

    linear_tpl=lora(Linear, rank=4)                        # one layer
    tr_atten_tpl=lora(DotProductAttention, rank=4, only=("query", "value"))  # layers inside one

An adapted layer is its base layer with `lora_a` and `lora_b` beside `w`: all other paths, and the
first values of all other weights, are those of the model without adapters. In a stack adapt the
block, not the stack.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from praxis_lite.core.errors import ConfigError, is_whole, require
from praxis_lite.layers.base.base_layer import zeros
from praxis_lite.layers.base.dense import Dense, Product, is_dense
from praxis_lite.layers.base.dims import NONE
from praxis_lite.layers.initializers import WeightInit

ADAPTER_WEIGHTS = ("lora_a", "lora_b")


def lora(
    base_tpl: Callable[..., Any],
    *,
    rank: int,
    alpha: float | None = None,
    only: Sequence[str] | None = None,
) -> Callable[..., Any]:
    """Returns a template as `base_tpl`, whose dense layers add `alpha / rank * x @ a @ b`.

    b starts with zeros, so that the adapted layer begins as the base layer.

    Args:
      base_tpl: of a dense layer (praxis_lite.layers.Dense) or of a layer with some inside.
      rank: of the product.
      alpha: None: rank, a factor of 1.
      only: adapt the layers whose path inside has one of these names, such as "query"; None: all.

    Raises:
      ConfigError: rank is not positive; or, once called, there is no layer to adapt.
    """
    _check_rank(rank)
    return functools.partial(adapted, base_tpl=base_tpl, rank=rank, alpha=alpha, only=only)


def adapted(
    *args: Any,
    base_tpl: Callable[..., Any],
    rank: int,
    alpha: float | None = None,
    only: Sequence[str] | None = None,
    rngs: nnx.Rngs,
    **kwargs: Any,
) -> Any:
    """Returns the layer that `lora(base_tpl, rank=rank, ...)` makes of the other arguments.

    For experiments: `fdl.Partial(adapted, base_tpl=fdl.Partial(Linear), rank=4)` has its rank
    within reach of --set.
    """
    _check_rank(rank)
    layer = base_tpl(*args, rngs=rngs, **kwargs)
    dense = [
        (path, node)
        for path, node in nnx.iter_graph(layer)
        if is_dense(node) and (only is None or set(map(str, path)) & set(only))
    ]
    if not dense:
        raise ConfigError(
            f"lora finds nothing to adapt in {type(layer).__name__}"
            + (f" under the names {tuple(only)}" if only is not None else "")
            + "; wanted is a Linear or another Dense layer, or a layer with such inside."
        )
    # Drawn from a copy: layers made after this one start as they would without it.
    key = jax.random.fold_in(nnx.clone(rngs).params(), rank)
    for i, (_, node) in enumerate(sorted(dense, key=lambda item: list(map(str, item[0])))):
        layer_rngs = nnx.Rngs(jax.random.fold_in(key, i))
        _adapt(node, rank, (rank if alpha is None else alpha) / rank, layer_rngs)
    return layer


def _check_rank(rank: int) -> None:
    require(is_whole(rank), "lora.rank", rank, "a positive integer")


def merge_adapters(module: nnx.Module) -> nnx.Module:
    """Returns a copy of `module` without adapters, each folded into its weight; stacks too."""
    module = nnx.clone(module)
    for node in adapted_layers(module).values():
        w = node.w[...]
        node.w.set_value(merged(w, node.lora_a[...], node.lora_b[...], node))
    return without_adapters(module)


def merged(w: jax.Array, a: jax.Array, b: jax.Array, layer: Any) -> jax.Array:
    """Returns a weight with its adapter's product added, in its own dtype; of stacks too.

    Args:
      w, a, b: [..., dims], with the stack's dims first.
      layer: adapted, for its equation and scale.
    """
    form = form_of(layer)
    product = jnp.einsum(f"...{form.a},...{form.b}->...{form.weight}", a, b)
    return w + layer.product.scale * product.reshape(w.shape).astype(w.dtype)


def without_adapters(module: nnx.Module) -> nnx.Module:
    """Returns a copy of `module` whose adapted layers are their base layers again."""
    module = nnx.clone(module)
    for node in adapted_layers(module).values():
        for name in ADAPTER_WEIGHTS:
            delattr(node, name)
        node.product = node.product.base
    return module


def adapted_layers(module: nnx.Module) -> dict[str, Any]:
    """Returns the layers with adapters by path, "transformer/blocks/self_attention/query"."""
    return {
        "/".join(map(str, path)): node for path, node in list(nnx.iter_graph(module))
        if isinstance(node, Dense) and isinstance(node.product, AdaptedProduct)
    }


@dataclasses.dataclass(frozen=True)
class AdaptedProduct(Product):
    """A product, with its bias, plus that of two thin matrices: none is as large as the weight.

    Attributes:
      base: the product with `w`.
    """

    base: Product
    scale: float

    def __call__(self, layer: Dense, inputs: jax.Array) -> jax.Array:
        form = form_of(layer)
        a, b = layer.lora_a[...].astype(inputs.dtype), layer.lora_b[...].astype(inputs.dtype)
        thin = jnp.einsum(f"...{form.inputs},{form.a}->...{form.between}", inputs, a)
        outputs = f"{form.leading}...{form.outputs}"
        product = jnp.einsum(f"...{form.between},{form.b}->{outputs}", thin * self.scale, b)
        return self.base(layer, inputs) + product

    def factors(self, layer: Dense, inputs: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        thin = inputs @ layer.lora_a[...].astype(inputs.dtype) * self.scale
        return [*self.base.factors(layer, inputs), (thin, layer.lora_b[...])]

    def column_factors(self, layer: Dense) -> list[tuple[jax.Array, jax.Array | None]]:
        into_D = layer.lora_a[...].T * self.scale
        return [*self.base.column_factors(layer), (layer.lora_b[...].T, into_D)]

    def adds_up(self) -> bool:
        return self.base.adds_up()


@dataclasses.dataclass(frozen=True)
class DenseForm:
    """The letters of a dense layer's equation, without leading dims. "r" is the rank's letter.

    Attributes:
      leading: letters that number the outputs of a layer that returns several.
      stack: letters of the weight that number layers side by side, each with an adapter.
    """

    inputs: str
    weight: str
    leading: str
    outputs: str
    stack: str

    @property
    def summed(self) -> str:
        return "".join(x for x in self.weight if x in self.inputs and x not in self.stack)

    @property
    def a(self) -> str:
        """Returns the letters of lora_a."""
        return self.stack + self.summed + "r"

    @property
    def b(self) -> str:
        """Returns the letters of lora_b."""
        taken = self.stack + self.summed
        return self.stack + "r" + "".join(x for x in self.weight if x not in taken)

    @property
    def between(self) -> str:
        """Returns the letters of `inputs @ a`."""
        kept = "".join(x for x in self.inputs if x not in self.summed)
        return kept + "".join(x for x in self.stack if x not in kept) + "r"


def form_of(layer: Dense) -> DenseForm:
    """Returns how a dense layer uses its weight."""
    operands, outputs = layer.equation.split("->")
    inputs, weight = operands.replace("...", "").split(",")
    leading, _, outputs = outputs.rpartition("...")
    stack = "".join(x for x in weight if x in leading or x in inputs and x in outputs)
    return DenseForm(inputs, weight, leading, outputs, stack)


def _adapt(layer: Dense, rank: int, scale: float, rngs: nnx.Rngs) -> None:
    """Adds `lora_a`, `lora_b` to a dense layer and makes it compute with them."""
    form, sizes = form_of(layer), layer.kernel(layer.w.dtype).shape
    size_of = dict(zip(form.weight, sizes, strict=True)) | {"r": rank}
    # Of merged dims the first has the split; the rank is whole.
    mapping = layer.w.get_metadata().get("split_dims_mapping")
    split_of = {group[0]: split for group, split in zip(layer.letters, mapping or (), strict=False)}
    fan_in = math.prod(size_of[letter] for letter in form.summed)
    for name, letters, init in (
        ("lora_a", form.a, WeightInit.Gaussian(fan_in**-0.5)), ("lora_b", form.b, zeros),
    ):
        shape = tuple(size_of[letter] for letter in letters)
        split = None if mapping is None else tuple(split_of.get(letter) for letter in letters)
        made = layer.weight(shape, split, init=init, matrix=NONE, rngs=rngs)
        setattr(layer, name, made)
    layer.product = AdaptedProduct(layer.product, scale)
