"""Matmuls in int8 or float8, or with weights rounded to 4 bits.

    task.model = fdl.Partial(
        quantized, model=fdl.Partial(TransformerLm, ...),
        rules=(fdl.Config(QuantizationRule, "transformer", qtype="int8"),))

Rules do not change a model's weights, slots or checkpoints. A weight is rounded every time it is
used. By default, weights have a scale per output channel and activations a scale per token; with
`scales="tensor"`, each array has a single scale. Products are summed in int32 (in float32 for
float8) and rescaled. Sums over devices are computed after rescaling, in the activations' dtype, if
the layers' sharding determines which devices sum together (`summing_devices`). Gradients ignore the
rounding (straight-through). Without a `bwd_qtype`, both matmuls of the backward pass use unrounded
operands in the model's dtype.

With "int4" or QLoRA's "nf4" (arXiv:2305.14314), only the weight is rounded, with a scale per
`block_size` inputs of a channel. The backward pass uses the rounded weight.

Matmuls of two activations (attention logits), experts, convolutions, recurrences, embeddings and
LoRA's low-rank matmuls are never rounded; matching layers that are not rounded are logged. The
weight of a softmax with a `chunk_size` cannot be rounded. Stored weights are float32 (see
four_bit_weights.py for 4 bits), so weights are rounded for every token in decoding. Rounding is to
nearest, in the backward pass as well. A sum of more than 133,000 int8 products, such as a
weight gradient over all tokens on a device, can overflow int32 if nearly all products have the
maximum magnitude.

`task.quantization = "float8"` (of a LanguageModelTask) or `--set task.quantization=float8` applies
a recipe from QUANTIZATION_RECIPES to all dense layers except the one that computes logits, forward
and backward. The recipes "nf4" and "int4" store the frozen weights of these layers in 4 bits.

8-bit arithmetic uses `qwix.quantize` and `qwix.einsum`. `qwix.quantize_model` is not used: it
intercepts only one method of a model (an LM has two, `__call__` and `compute_loss`), finds layers
by walking Python's stack, and calls deprecated Flax methods.
"""

import dataclasses
import functools
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flax import nnx

from praxis_lite.core.errors import (
    ConfigError,
    did_you_mean,
    is_positive_int,
    require,
    require_choice,
)
from praxis_lite.core.learner.learner import Learner
from praxis_lite.core.models.model import Model
from praxis_lite.core.sharding.leaf_paths import path_pattern
from praxis_lite.core.sharding.split_dims import SplitDims
from praxis_lite.host.optional_packages import optional_module
from praxis_lite.layers.base.dense import Product, is_dense
from praxis_lite.layers.base.variables import num_stacked_dims
from praxis_lite.layers.whole_model.four_bit_weights import (
    BLOCK_SIZE,
    WEIGHT_QTYPES,
    four_bit_packs,
)
from praxis_lite.layers.whole_model.packed_weights import PackedModel, check_frozen
from praxis_lite.layers.whole_model.rounded_products import (
    QTYPES,
    SCALES,
    RoundedProduct,
    RoundedWeight,
)


@dataclasses.dataclass(frozen=True)
class QuantizationRule:
    """Rounds the matmuls of dense layers whose weight path matches a pattern.

    Attributes:
      regex: A pattern that must match the beginning of a weight's path (`re.match`), such as
        "transformer/.*/ffn_layer". The first matching rule applies.
      qtype: "int8", "float8_e4m3fn" or "float8_e5m2" to round inputs and weight to this type;
        "int4" or "nf4" to round only the weight; None for no rounding.
      bwd_qtype: Type to which the incoming gradient is rounded in both matmuls of the backward
        pass; the other operand is rounded to `qtype`. If None, the backward pass is not rounded.
        Not supported with 4 bits.
      block_size: Number of inputs, along the last input dim, that share a scale in a 4-bit weight.
        If None, 64.
      scales: For 8 bits: "channel" for one scale per output channel of a weight and per token, or
        "tensor" for one scale per array, over all devices.
      exclude_logits: Whether to exclude layers that compute logits.

    Raises:
      ConfigError: A type is unknown, integer and float types are mixed, `regex` is invalid, or a
        setting does not apply to the type.
    """

    regex: str
    qtype: str | None = "int8"
    bwd_qtype: str | None = None
    block_size: int | None = None
    scales: str = "channel"
    exclude_logits: bool = False

    def __post_init__(self) -> None:
        for name, qtypes in (("qtype", (*QTYPES, *WEIGHT_QTYPES)), ("bwd_qtype", QTYPES)):
            value = getattr(self, name)
            if value is not None:
                require_choice(f"QuantizationRule.{name}", value, qtypes)
        require_choice("QuantizationRule.scales", self.scales, SCALES)
        has_blocks = self.qtype in WEIGHT_QTYPES
        if self.block_size is not None:
            require(
                is_positive_int(self.block_size) and has_blocks,
                "QuantizationRule.block_size",
                self.block_size,
                "a positive integer if qtype is 'int4' or 'nf4', otherwise None",
            )
        if has_blocks and self.bwd_qtype is not None:
            raise ConfigError(
                f"QuantizationRule: qtype {self.qtype!r} rounds only weights, and cannot be "
                f"combined with bwd_qtype {self.bwd_qtype!r}. Omit bwd_qtype."
            )
        if self.bwd_qtype is not None and (self.qtype or "")[:3] != self.bwd_qtype[:3]:
            raise ConfigError(
                f"QuantizationRule: qtype {self.qtype!r} cannot be combined with bwd_qtype "
                f"{self.bwd_qtype!r}, because the backward pass multiplies the two types. Use int8 "
                "for both, or float8 types for both."
            )
        path_pattern("QuantizationRule.regex", self.regex)

    def apply(self, product: Product, rows_split: SplitDims = None) -> Product:
        """Returns `product` with a quantized matmul by `w`; matmuls of adapters stay exact.

        Args:
          product: The product of a dense layer.
          rows_split: Sharding of the inputs' batch and time.
        """
        if self.qtype in WEIGHT_QTYPES:
            return product.with_base(RoundedWeight(self.qtype, self.block_size or BLOCK_SIZE))
        assert self.qtype is not None, "Layers without rounding are skipped."
        return product.with_base(
            RoundedProduct(self.qtype, self.bwd_qtype, self.scales, rows_split)
        )


def quantized(
    *args: Any,
    model: Callable[..., nnx.Module],
    rules: Sequence[QuantizationRule],
    rngs: nnx.Rngs,
    **kwargs: Any,
) -> nnx.Module:
    """Builds a model by calling `model`, and quantizes its dense layers according to `rules`.

    Raises:
      ConfigError: Qwix is not installed, there are no rules, or a rule matches no layer.
    """
    optional_module("qwix", "quantized")
    if not rules:
        raise ConfigError("quantized.rules is empty; expected at least one QuantizationRule.")
    layer = model(*args, rngs=rngs, **kwargs)
    nodes = {"/".join(map(str, path)): node for path, node in nnx.compat.iter_graph(layer)}
    dense = {f"{path}/w".lstrip("/"): node for path, node in nodes.items() if is_dense(node)}
    used = set()
    names: dict[str | None, list[str]] = {}
    # The first rule that matches a layer applies. A rule may exempt layers from rounding.
    for path, node in dense.items():
        for i, rule in enumerate(rules):
            if re.match(rule.regex, path):
                used.add(i)
                is_exact = rule.qtype is None or (rule.exclude_logits and node.makes_logits)
                if not is_exact:
                    node.product = rule.apply(node.product, _rows_split(path[: -len("/w")], nodes))
                names.setdefault(None if is_exact else rule.qtype, []).append(path)
                break
    for i, rule in enumerate(rules):
        if i not in used:
            raise _unused_error(rule, list(dense))
    # Log weights that a rule matches but that belong to no dense layer, so they are not rounded.
    not_dense = [
        path
        for path, node in nodes.items()
        if is_matrix(node) and path not in dense
        if any(re.match(rule.regex, path) for rule in rules)
    ]
    log_rounding(tuple((str(q), tuple(paths)) for q, paths in names.items()), tuple(not_dense))
    return layer


def _rows_split(path: str, nodes: Mapping[str, Any]) -> SplitDims:
    """Returns the sharding of a dense layer's batch and time, from the layer or its parent."""
    parent, _, name = path.rpartition("/")
    parent_array = "output" if name == "post" else "activation"  # `post` computes the outputs.
    for layer, array in ((nodes[path], "activation"), (nodes[parent], parent_array)):
        mapping = getattr(layer, f"{array}_split_dims_mapping", None)
        if mapping is not None:
            return tuple(mapping[:2])
    return None


def is_matrix(node: Any) -> bool:
    """Returns whether a node is a weight with at least two dims, not counting stacked dims."""
    return isinstance(node, nnx.Param) and node.ndim - num_stacked_dims(node) > 1


def _unused_error(rule: QuantizationRule, paths: Sequence[str]) -> ConfigError:
    is_matched = any(re.match(rule.regex, path) for path in paths)
    kind = "that no earlier rule matches" if is_matched else "of a dense layer"
    near = did_you_mean(rule.regex, paths)
    shown = ", ".join(paths[:12]) + (f" and {len(paths) - 12} more" if len(paths) > 12 else "")
    return ConfigError(
        f"QuantizationRule.regex {rule.regex!r} matches no weight {kind}; expected the beginning "
        f"of one of {shown}.{near} Correct the pattern, or remove the rule."
    )


@functools.cache
def log_rounding(
    names: tuple[tuple[str, tuple[str, ...]], ...], not_dense: tuple[str, ...]
) -> None:
    """Logs which weights are rounded, once per process for each model."""
    logger = logging.getLogger(__name__)
    for qtype, paths in names:
        rounding = "not rounded, because of a rule" if qtype == "None" else f"products in {qtype}"
        logger.info("%s: %s", rounding, ", ".join(paths))
    if not_dense:
        logger.info("not rounded, because not in a dense layer: %s", ", ".join(not_dense))


_rule = functools.partial(QuantizationRule, "", exclude_logits=True)
# As in arXiv:2209.05433: more digits in the forward pass, a wider range in the backward pass.
_float8 = functools.partial(_rule, "float8_e4m3fn", "float8_e5m2")

# The values of `task.quantization`; a str is the type in which weights are stored.
QUANTIZATION_RECIPES: Mapping[str, QuantizationRule | str] = {
    # One scale per output channel and per token; the most accurate.
    "int8": _rule("int8", "int8"),
    "float8": _float8(),
    # One scale per weight, and one for all tokens: fewer operations, but less accurate.
    "int8_per_tensor": _rule("int8", "int8", scales="tensor"),
    "float8_per_tensor": _float8(scales="tensor"),
    # Frozen 4-bit weights, for training adapters (QLoRA, arXiv:2305.14314).
    "nf4": "nf4",
    "int4": "int4",
}


def with_recipe(
    model: Model | Callable[..., nnx.Module], recipe: str | None, learner: Learner
) -> Model | Callable[..., nnx.Module]:
    """Applies a quantization recipe to a task's model.

    Args:
      model: The model, or a function that builds it.
      recipe: A name in QUANTIZATION_RECIPES. If None, the model is returned unchanged.
      learner: The learner of the task, which must not train 4-bit weights.

    Raises:
      ConfigError: The recipe is unknown, the model is not built from this library's layers, or the
        learner trains 4-bit weights.
    """
    if recipe is None:
        return model
    require_choice("task.quantization", recipe, QUANTIZATION_RECIPES)
    if isinstance(model, Model):
        raise ConfigError(
            f"task.quantization is {recipe!r}, but the model is a {type(model).__name__}, and only "
            "dense layers of praxis_lite can be quantized. Omit the setting."
        )
    rule = QUANTIZATION_RECIPES[recipe]
    if isinstance(rule, QuantizationRule):
        return functools.partial(quantized, model=model, rules=(rule,))
    packed_model = PackedModel(model, functools.partial(four_bit_packs, qtype=rule))
    check_frozen(packed_model, learner)
    return packed_model
