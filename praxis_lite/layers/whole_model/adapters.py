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

from praxis_lite.core.errors import ConfigError, require
from praxis_lite.core.sharding.split_dims import DimSplit, constrain
from praxis_lite.layers.attention.projections import (
    AttentionProjection,
    CombinedQKVProjectionLayer,
    OneHeadedAttentionProjection,
)
from praxis_lite.layers.base_layer import BaseLayer, zeros
from praxis_lite.layers.initializers import WeightInit
from praxis_lite.layers.linears import Einsum, Linear

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
      base_tpl: of a dense layer (the classes in DENSE) or of one that has some inside.
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
        if type(node) in DENSE and (only is None or set(map(str, path)) & set(only))
    ]
    if not dense:
        raise ConfigError(
            f"lora finds nothing to adapt in {type(layer).__name__}"
            + (f" under the names {tuple(only)}" if only is not None else "")
            + f"; wanted is one of {sorted(cls.__name__ for cls in DENSE)}, or a layer with such "
            "inside."
        )
    # Drawn from a copy: layers made after this one start as they would without it.
    key = jax.random.fold_in(nnx.clone(rngs).params(), rank)
    for i, (_, node) in enumerate(sorted(dense, key=lambda item: list(map(str, item[0])))):
        layer_rngs = nnx.Rngs(jax.random.fold_in(key, i))
        _adapt(node, rank, (rank if alpha is None else alpha) / rank, layer_rngs)
    return layer


def _check_rank(rank: int) -> None:
    is_right = isinstance(rank, int) and not isinstance(rank, bool) and rank >= 1
    require(is_right, "lora.rank", rank, "a positive integer")


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
      layer: adapted, for its form and scale.
    """
    form = layer.lora_form
    product = jnp.einsum(f"...{form.a},...{form.b}->...{form.weight}", a, b)
    return w + layer.lora_scale * product.reshape(w.shape).astype(w.dtype)


def without_adapters(module: nnx.Module) -> nnx.Module:
    """Returns a copy of `module` whose adapted layers are their base layers again."""
    module = nnx.clone(module)
    for node in adapted_layers(module).values():
        for name in (*ADAPTER_WEIGHTS, "lora_form", "lora_scale"):
            delattr(node, name)
        object.__setattr__(node, "__class__", node.base_class)
    return module


def adapted_layers(module: nnx.Module) -> dict[str, Any]:
    """Returns the layers with adapters by path, "transformer/blocks/self_attention/query"."""
    return {
        "/".join(map(str, path)): node for path, node in list(nnx.iter_graph(module))
        if hasattr(node, "lora_form")
    }


@dataclasses.dataclass(frozen=True)
class DenseForm:
    """The einsum that a layer is of its inputs and its weight. "r" is the rank's letter.

    Attributes:
      inputs, outputs: letters of dims, after any leading ones.
      weight, shape: letters and sizes of the weight's dims; `w` may have some of them merged.
      stack: letters of the weight that number layers side by side, each with an adapter.
    """

    inputs: str
    weight: str
    outputs: str
    shape: tuple[int, ...]
    stack: str = ""

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

    @property
    def leading(self) -> str:
        """Returns the letters that number the outputs of a layer that returns several."""
        return "".join(x for x in self.stack if x not in self.outputs)


def _of_projection(layer: AttentionProjection) -> DenseForm:
    D, N, K = layer.shape_DNK
    if layer.is_NKD:
        return DenseForm("nk", "nkd", "d", (N, K, D))
    inputs, outputs = ("nk", "d") if layer.is_output_projection else ("d", "nk")
    return DenseForm(inputs, "dnk", outputs, (D, N, K))


def _of_einsum(layer: Einsum) -> DenseForm:
    left, outputs = layer.equation.replace(" ", "").replace("...", "").split("->")
    inputs, weight = left.split(",")
    stack = "".join(x for x in weight if x in inputs and x in outputs)
    return DenseForm(inputs, weight, outputs, layer.w.shape, stack)


# How each dense layer uses its weight. A layer of your own that is an einsum can be added.
DENSE: dict[type, Callable[[Any], DenseForm]] = {
    Linear: lambda layer: DenseForm("d", "df", "f", layer.w.shape),
    Einsum: _of_einsum,
    AttentionProjection: _of_projection,
    OneHeadedAttentionProjection: lambda layer: DenseForm("d", "dk", "k", layer.w.shape),
    CombinedQKVProjectionLayer: lambda layer: DenseForm(
        "d", "cdnk", "nk", (3, *layer.shape_DNK), stack="c"
    ),
}


def _adapt(layer: BaseLayer, rank: int, scale: float, rngs: nnx.Rngs) -> None:
    """Adds `lora_a`, `lora_b` to a dense layer and makes it compute with them."""
    form = DENSE[type(layer)](layer)
    size_of = dict(zip(form.weight, form.shape, strict=True)) | {"r": rank}
    split_of = dict(zip(form.weight, _splits(layer, form), strict=True))  # The rank is whole.
    fan_in = math.prod(size_of[letter] for letter in form.summed)
    for name, letters, init in (
        ("lora_a", form.a, WeightInit.Gaussian(fan_in**-0.5)),
        ("lora_b", form.b, zeros),
    ):
        shape = tuple(size_of[letter] for letter in letters)
        split = tuple(split_of.get(letter) for letter in letters)
        setattr(layer, name, layer.weight(shape, split, init=init, rngs=rngs))
    layer.lora_form, layer.lora_scale = form, scale
    # The class, rather than a layer around this one, so that `w` keeps its path.
    object.__setattr__(layer, "__class__", _adapted_class(type(layer)))


def _splits(layer: BaseLayer, form: DenseForm) -> tuple[DimSplit, ...]:
    """Returns a split per letter of the weight; of merged dims the first has the split."""
    mapping = tuple(layer.w.get_metadata().get("split_dims_mapping") or ())
    remaining = list(zip(layer.w.shape, (*mapping, *(None,) * layer.w.ndim), strict=False))
    splits, left = [], 1
    for size in form.shape:
        split = None
        if left == 1 and remaining:
            # A dim of `w` that is larger than its letter's size holds the next letters as well.
            left, split = remaining.pop(0)
        splits.append(split)
        left //= size
    return tuple(splits)


def _call(layer: Any, inputs: jax.Array) -> Any:
    """Returns the outputs of an adapted layer."""
    outputs = layer.base_class.__call__(layer, inputs)
    form = layer.lora_form
    a, b = layer.lora_a[...].astype(inputs.dtype), layer.lora_b[...].astype(inputs.dtype)
    thin = jnp.einsum(f"...{form.inputs},{form.a}->...{form.between}", inputs, a)
    product = jnp.einsum(
        f"...{form.between},{form.b}->{form.leading}...{form.outputs}", thin * layer.lora_scale, b
    )
    if isinstance(outputs, tuple):
        return tuple(x + y for x, y in zip(outputs, product, strict=True))
    product = product.reshape(outputs.shape)  # One head has a dim that its weight lacks.
    return constrain(outputs + product, layer.activation_split_dims_mapping)


def _factors(layer: Any, inputs: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
    thin = inputs @ layer.lora_a[...].astype(inputs.dtype) * layer.lora_scale
    return [*layer.base_class.factors(layer, inputs), (thin, layer.lora_b[...])]


def _column_factors(layer: Any) -> list[tuple[jax.Array, jax.Array | None]]:
    into_D = layer.lora_a[...].T * layer.lora_scale
    return [*layer.base_class.column_factors(layer), (layer.lora_b[...].T, into_D)]


@functools.cache
def _adapted_class(base: type) -> type:
    """Returns the class of a class's adapted layers; with its base, so that it can become it."""
    methods = {"base_class": base, "__call__": _call, "__module__": __name__}
    if base is Linear:
        methods |= {"factors": _factors, "column_factors": _column_factors}
    return type(base)(f"Lora{base.__name__}", (base,), methods)
