"""LoRA and DoRA: dense layers that learn a low-rank update to w.

    linear_tpl=lora(Linear, rank=4)                        # one layer
    tr_atten_tpl=lora(DotProductAttention, rank=4, only=("query", "value"))  # several sublayers

An adapted layer is its base layer with additional weights `lora_a` and `lora_b`. All other paths
and initial values are the same as without adapters. To adapt a stack, adapt its block. The product
with `w` can be replaced before or after the adapter is added, for example by a rounded product
(quantization.py).
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from praxis_lite.core.errors import ConfigError, first_few, is_positive_int, require
from praxis_lite.layers.base.base_layer import Initializer, zeros
from praxis_lite.layers.base.dense import Dense, is_dense
from praxis_lite.layers.base.dims import NONE
from praxis_lite.layers.initializers import WeightInit
from praxis_lite.layers.whole_model.adapted_products import (
    AdaptedProduct,
    DecomposedProduct,
    form_of,
)

# The weights of DoRA include those of LoRA.
ADAPTER_WEIGHTS = DecomposedProduct.weights


def lora(
    base_tpl: Callable[..., Any],
    *,
    rank: int,
    alpha: float | None = None,
    only: Sequence[str] | None = None,
    use_dora: bool = False,
) -> Callable[..., Any]:
    """Returns a template like `base_tpl` whose dense layers also add `alpha / rank * x @ a @ b`.

    b starts as zeros, so the adapted layer starts out equal to the base layer (arXiv:2106.09685).

    Args:
      base_tpl: A template of a dense layer (praxis_lite.layers.Dense), or of a layer that contains
        dense layers.
      rank: The rank of a @ b.
      alpha: The numerator of the scale. If None, rank, which gives a scale of 1.
      only: Adapt only layers whose path contains one of these names, such as "query". If None, all
        layers are adapted.
      use_dora: Whether to also learn the length of each column of w + a @ b (DoRA,
        arXiv:2402.09353). The learned length is the length in w plus `lora_m`, which starts as
        zeros. Columns are divided by their current length, which the backward pass treats as a
        constant (section 4.3 of the paper).

    Raises:
      ConfigError: rank is not positive. When called: there is no layer to adapt, or a layer already
        has an adapter.
    """
    _check_rank(rank)
    return functools.partial(
        adapted, base_tpl=base_tpl, rank=rank, alpha=alpha, only=only, use_dora=use_dora
    )


def adapted(
    *args: Any,
    base_tpl: Callable[..., Any],
    rank: int,
    alpha: float | None = None,
    only: Sequence[str] | None = None,
    use_dora: bool = False,
    rngs: nnx.Rngs,
    **kwargs: Any,
) -> Any:
    """Returns `lora(base_tpl, rank=rank, ...)(*args, rngs=rngs, **kwargs)`.

    Use it in experiments, as `fdl.Partial(adapted, base_tpl=fdl.Partial(Linear), rank=4)`, so that
    --set can change the rank.
    """
    _check_rank(rank)
    layer = base_tpl(*args, rngs=rngs, **kwargs)
    dense = [
        (path, node)
        for path, node in nnx.compat.iter_graph(layer)
        if is_dense(node) and (only is None or set(map(str, path)) & set(only))
    ]
    if not dense:
        raise ConfigError(
            f"lora found no layer to adapt in {type(layer).__name__}"
            + (f" with the names {tuple(only)}" if only is not None else "")
            + "; expected a Linear or other Dense layer, or a layer that contains one."
        )
    already = ["/".join(map(str, path)) for path, node in dense if is_adapted(node)]
    if already:
        raise ConfigError(
            f"lora: there is already an adapter in {first_few(already)} of {type(layer).__name__}. "
            "Remove one of the two adapters, or select other layers with `only`."
        )
    # Draw the key from a copy, so that layers created later get the same keys as without adapters.
    key = jax.random.fold_in(nnx.compat.clone(rngs).params(), rank)
    for i, (_, node) in enumerate(sorted(dense, key=lambda item: list(map(str, item[0])))):
        layer_rngs = nnx.Rngs(jax.random.fold_in(key, i))
        _adapt(node, rank, (rank if alpha is None else alpha) / rank, use_dora, layer_rngs)
    return layer


def _check_rank(rank: int) -> None:
    require(is_positive_int(rank), "lora.rank", rank, "a positive integer")


def merge_adapters(module: nnx.Module) -> nnx.Module:
    """Returns a copy of `module` with all adapters merged into their weights."""
    module = nnx.compat.clone(module)
    for node in adapted_layers(module).values():
        adapters = [getattr(node, name)[...] for name in node.product.weights]
        node.w.set_value(node.product.merge(node, node.w[...], *adapters))
    return without_adapters(module)


def without_adapters(module: nnx.Module) -> nnx.Module:
    """Returns a copy of `module` without adapters."""
    module = nnx.compat.clone(module)
    for node in adapted_layers(module).values():
        for name in node.product.weights:
            delattr(node, name)
        node.product = node.product.base
    return module


def adapted_layers(module: nnx.Module) -> dict[str, Any]:
    """Returns the layers with adapters, keyed by path, such as "lm/blocks/self_attention/query"."""
    return {
        "/".join(map(str, path)): node
        for path, node in list(nnx.compat.iter_graph(module))
        if is_adapted(node)
    }


def is_adapted(node: Any) -> bool:
    """Returns whether `node` is a dense layer with an adapter."""
    return isinstance(node, Dense) and isinstance(node.product, AdaptedProduct)


def _adapt(layer: Dense, rank: int, scale: float, use_dora: bool, rngs: nnx.Rngs) -> None:
    """Adds an adapter to a dense layer."""
    layer.product = (DecomposedProduct if use_dora else AdaptedProduct)(layer.product, scale)
    form, sizes = form_of(layer), layer.kernel(layer.w.dtype).shape
    size_of = dict(zip(form.weight, sizes, strict=True)) | {form.rank: rank}
    # The mesh axes of a merged dim shard its first letter. The rank is not sharded.
    mapping = layer.w.get_metadata().get("split_dims_mapping")
    split_of = {group[0]: split for group, split in zip(layer.letters, mapping or (), strict=False)}
    fan_in = math.prod(size_of[letter] for letter in form.contracted)
    forms = (form.a, form.b, form.kept)
    inits: tuple[Initializer, ...] = (WeightInit.Gaussian(fan_in**-0.5), zeros, zeros)
    for name, letters, init in zip(layer.product.weights, forms, inits, strict=False):
        shape = tuple(size_of[letter] for letter in letters)
        split = None if mapping is None else tuple(split_of.get(letter) for letter in letters)
        weight = layer.weight(shape, split, init=init, matrix=NONE, rngs=rngs)
        setattr(layer, name, weight)


REFERENCE = "reference"


def with_reference(*args: Any, base_tpl: Callable[..., Any], rngs: nnx.Rngs, **kwargs: Any) -> Any:
    """Builds `base_tpl(*args, rngs=rngs, **kwargs)`, and adds a copy of it as `reference`.

    The copy starts with the same weights. Exclude the copy from training with
    `learner.bprop_variable_exclusion="reference/.*"`. Models with adapters do not need a copy.
    """
    same_rngs = nnx.compat.clone(rngs)
    module = base_tpl(*args, rngs=rngs, **kwargs)
    setattr(module, REFERENCE, base_tpl(*args, rngs=same_rngs, **kwargs))
    return module


def reference_of(module: nnx.Module) -> nnx.Module:
    """Returns the initial model of `module`: its reference copy, or `module` without adapters.

    Raises:
      ConfigError: The module has neither a reference copy nor adapters.
    """
    if hasattr(module, REFERENCE):
        return getattr(module, REFERENCE)
    if not adapted_layers(module):
        raise ConfigError(
            f"{type(module).__name__} has neither adapters nor a reference copy. Add adapters "
            "(praxis_lite.layers.lora), or build the model with "
            "fdl.Partial(praxis_lite.layers.with_reference, base_tpl=...)."
        )
    return without_adapters(module)
