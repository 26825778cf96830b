"""Matrix products in int8 or float8 while training: a setting around a model, by Qwix.

    task.model = fdl.Partial(
        quantized, model=fdl.Partial(TransformerLm, ...),
        rules=(fdl.Config(QuantizationRule, "transformer", qtype="int8"),))

Weights, slots and checkpoints are those of the model without it. A weight is rounded each time that
it is used, with a scale per output channel; activations are rounded with a scale per token. The
product is summed in int32 (float8: in float32) and scaled back. Gradients pass the rounding as if
it were not there; without a `bwd_qtype` the two products of the backward pass are of the unrounded
factors, in the model's dtype.

Never rounded are products of two activations (attention's logits), experts, convolutions,
recurrences, embeddings and LoRA's thin products; the log names the layers that a pattern matches
and that are not rounded. A softmax with a `chunk_size` cannot have its weight rounded. Stored
weights stay float32, so that decoding rounds them for every token. Rounding is to nearest, in the
backward pass too. A sum of more than 133,000 int8 products can leave int32 if nearly all are the
largest (with a `bwd_qtype`, a weight's gradient sums over all tokens of a device).

Only the arithmetic is Qwix's: `qwix.quantize` and `qwix.einsum`. Its `qwix.quantize_model`
intercepts one method of a model (an LM has two, `__call__` and `compute_loss`), finds layers by
walking Python's stack, and asks Flax for methods that are deprecated.
"""

import dataclasses
import functools
import logging
import re
import string
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from praxis_lite.core.errors import ConfigError, did_you_mean, require_choice
from praxis_lite.core.sharding.leaf_paths import path_pattern
from praxis_lite.host.optional_packages import optional_module
from praxis_lite.layers.base.dense import Dense, Product, is_dense
from praxis_lite.layers.whole_model.adapters import AdaptedProduct

QTYPES = ("int8", "float8_e4m3fn", "float8_e5m2")
# The largest int8 is 127. Qwix's own bound of 127.5 puts each row's largest element between two
# integers, where the last bit of a float decides, which may differ from mesh to mesh.
_CALIBRATION = dict.fromkeys(QTYPES, "absmax") | {"int8": f"absmax,{127.5 / 127}"}


@dataclasses.dataclass(frozen=True)
class QuantizationRule:
    """How the layers are multiplied whose weight's path a pattern matches.

    Attributes:
      regex: matched from the start of a weight's path (`re.match`), such as
        "transformer/.*/ffn_layer"; of several rules the first that matches counts.
      qtype: of inputs and weight: "int8", "float8_e4m3fn", "float8_e5m2"; None: not rounded.
      bwd_qtype: of the incoming gradient in both products of the backward pass, whose other factor
        is rounded to `qtype`; None: the backward pass is not rounded.

    Raises:
      ConfigError: no type has that name, one is of integers and the other of floats, or `regex` is
        no regular expression.
    """

    regex: str
    qtype: str | None = "int8"
    bwd_qtype: str | None = None

    def __post_init__(self):
        for name in ("qtype", "bwd_qtype"):
            value = getattr(self, name)
            if value is not None:
                require_choice(f"QuantizationRule.{name}", value, QTYPES)
        if self.bwd_qtype is not None and (self.qtype or "")[:3] != self.bwd_qtype[:3]:
            raise ConfigError(
                f"QuantizationRule: qtype is {self.qtype!r} and bwd_qtype {self.bwd_qtype!r}; the "
                "backward pass multiplies the two. Take int8 for both, or float8 types for both."
            )
        path_pattern("QuantizationRule.regex", self.regex)


def quantized(
    *args: Any,
    model: Callable[..., nnx.Module],
    rules: Sequence[QuantizationRule],
    rngs: nnx.Rngs,
    **kwargs: Any,
) -> nnx.Module:
    """Returns the layer that `model` builds, its dense layers multiplying by the rules.

    Raises:
      ConfigError: Qwix is not installed, there are no rules, or one matches no layer; names the
        weights that there are.
    """
    optional_module("qwix", "quantized")
    if not rules:
        raise ConfigError("quantized.rules is empty; wanted is a QuantizationRule or several.")
    layer = model(*args, rngs=rngs, **kwargs)
    nodes = {"/".join(map(str, path)): node for path, node in nnx.iter_graph(layer)}
    dense = {f"{path}/w".lstrip("/"): node for path, node in nodes.items() if is_dense(node)}
    used, names = set(), {}
    for path, node in dense.items():
        for i, rule in enumerate(rules):
            if re.match(rule.regex, path):
                used.add(i)
                node.product = _rounded(node.product, rule)
                names.setdefault(rule.qtype, []).append(path)
                break
    for i, rule in enumerate(rules):
        if i not in used:
            raise _unused(rule, list(dense))
    left = [
        path
        for path, node in nodes.items()
        if is_matrix(node) and path not in dense
        if any(re.match(rule.regex, path) for rule in rules)
    ]
    log_rounding(tuple((str(q), tuple(paths)) for q, paths in names.items()), tuple(left))
    return layer


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def quantized_einsum(
    equation: str, qtype: str, bwd_qtype: str | None, x: jax.Array, w: jax.Array
) -> jax.Array:
    """Returns `einsum(equation, x, w)` of rounded factors, in x's dtype.

    Args:
      equation: "bd,df->bf": two factors, each letter in two of the three.
      qtype, bwd_qtype: see QuantizationRule.
    """
    return _einsum(equation, (x, qtype), (w, qtype)).astype(x.dtype)


def _forward(equation: str, qtype: str, bwd_qtype: str | None, x: jax.Array, w: jax.Array):
    return quantized_einsum(equation, qtype, bwd_qtype, x, w), (x, w)


def _backward(
    equation: str, qtype: str, bwd_qtype: str | None, residuals: tuple, g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, w = residuals
    factors, outputs = equation.split("->")
    of_x, of_w = factors.split(",")
    for_x, for_w = f"{outputs},{of_w}->{of_x}", f"{outputs},{of_x}->{of_w}"
    if bwd_qtype is None:
        dx, dw = jnp.einsum(for_x, g, w.astype(g.dtype)), jnp.einsum(for_w, g, x)
    else:
        dx = _einsum(for_x, (g, bwd_qtype), (w, qtype))
        dw = _einsum(for_w, (g, bwd_qtype), (x, qtype))
    return dx.astype(x.dtype), dw.astype(w.dtype)


quantized_einsum.defvjp(_forward, _backward)


def _einsum(equation: str, *factors: tuple[jax.Array, str]) -> jax.Array:
    """Returns the float32 product of factors, each rounded to its type.

    A factor has a scale for each index that the product keeps.
    """
    qwix = optional_module("qwix", "quantized")
    letters, outputs = equation.split("->")
    rounded = [
        qwix.quantize(
            factor.astype(jnp.float32),
            jnp.dtype(qtype),
            channelwise_axes=[i for i, letter in enumerate(local) if letter in outputs],
            calibration_method=_CALIBRATION[qtype],
        )
        for local, (factor, qtype) in zip(letters.split(","), factors, strict=True)
    ]
    return qwix.einsum(equation, *rounded)


@dataclasses.dataclass(frozen=True)
class RoundedProduct(Product):
    """The product of inputs and weight, both rounded by a rule."""

    rule: QuantizationRule

    def multiplied(self, layer: Dense, inputs: jax.Array) -> jax.Array:
        equation = layer.equation
        free = [letter for letter in string.ascii_letters if letter not in equation]
        num_leading = inputs.ndim - len(equation.partition(",")[0].replace("...", ""))
        return quantized_einsum(
            equation.replace("...", "".join(free[:num_leading])), self.rule.qtype,
            self.rule.bwd_qtype, inputs, layer.kernel(layer.w.dtype),
        )

    def factors(self, layer: Dense, inputs: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        raise ConfigError(
            "A softmax with a chunk_size cuts the weight of its linear layer, which a rule "
            f"({self.rule.regex!r}) rounds to {self.rule.qtype}. Set chunk_size to None, or put "
            'QuantizationRule("softmax", qtype=None) before the other rules.'
        )

    def adds_up(self) -> bool:
        return False


def is_matrix(node: Any) -> bool:
    """Returns True for a weight of two dims or more, those of stacks not counted."""
    if not isinstance(node, nnx.Param):
        return False
    stack = node.get_metadata().get("stack_split_dims_mapping", ())
    return node.ndim - len(stack) > 1


def _rounded(product: Product, rule: QuantizationRule) -> Product:
    if rule.qtype is None:
        return product
    if isinstance(product, AdaptedProduct):  # Thin products stay as they are.
        return dataclasses.replace(product, base=_rounded(product.base, rule))
    return RoundedProduct(rule)


def _unused(rule: QuantizationRule, paths: Sequence[str]) -> ConfigError:
    taken = any(re.match(rule.regex, path) for path in paths)
    what = "that a rule before it has not taken" if taken else "of a dense layer"
    near = did_you_mean(rule.regex, paths)
    shown = ", ".join(paths[:12]) + (f" and {len(paths) - 12} more" if len(paths) > 12 else "")
    return ConfigError(
        f"QuantizationRule.regex {rule.regex!r} matches no weight {what}; wanted is the beginning "
        f"of one of {shown}.{near} Mend it, or take the rule out."
    )


@functools.cache
def log_rounding(names: tuple[tuple[str, tuple[str, ...]], ...], left: tuple[str, ...]) -> None:
    """Logs which weights are rounded and which are left: once in a process for each model."""
    logger = logging.getLogger("praxis_lite")
    for qtype, paths in names:
        what = "not rounded, by a rule" if qtype == "None" else f"products in {qtype}"
        logger.info("%s: %s", what, ", ".join(paths))
    if left:
        logger.info("not rounded, being no dense layers: %s", ", ".join(left))
