"""Products of dense layers with rounded factors, by Qwix: in 8 bits, or of weights in 4."""

import dataclasses
import functools
import string

import jax
import jax.numpy as jnp

from praxis_lite.core.errors import ConfigError
from praxis_lite.host.optional_packages import optional_module
from praxis_lite.layers.base.dense import Dense, Product, in_order
from praxis_lite.layers.whole_model.four_bit_weights import in_4_bits

QTYPES = ("int8", "float8_e4m3fn", "float8_e5m2")
# Of a factor: one for each row or column that a product keeps, or one for all.
SCALES = ("channel", "tensor")
# The largest int8 is 127. Qwix's own bound of 127.5 puts each row's largest element between two
# integers, where the last bit of a float decides, which may differ from mesh to mesh.
_CALIBRATION = dict.fromkeys(QTYPES, "absmax") | {"int8": f"absmax,{127.5 / 127}"}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 5))
def quantized_einsum(
    equation: str, qtype: str, bwd_qtype: str | None, x: jax.Array, w: jax.Array,
    scales: str = "channel",
) -> jax.Array:
    """Returns `einsum(equation, x, w)` of rounded factors, in x's dtype.

    Args:
      equation: "bd,df->bf": two factors, each letter in two of the three.
      qtype, bwd_qtype, scales: see QuantizationRule.
    """
    return _einsum(equation, scales, (x, qtype), (w, qtype)).astype(x.dtype)


def _forward(
    equation: str, qtype: str, bwd_qtype: str | None, x: jax.Array, w: jax.Array, scales: str
):
    return quantized_einsum(equation, qtype, bwd_qtype, x, w, scales), (x, w)


def _backward(
    equation: str, qtype: str, bwd_qtype: str | None, scales: str, residuals: tuple, g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, w = residuals
    factors, outputs = equation.split("->")
    of_x, of_w = factors.split(",")
    for_x, for_w = f"{outputs},{of_w}->{of_x}", f"{outputs},{of_x}->{of_w}"
    if bwd_qtype is None:
        dx, dw = jnp.einsum(for_x, g, w.astype(g.dtype)), jnp.einsum(for_w, g, x)
    else:
        dx = _einsum(for_x, scales, (g, bwd_qtype), (w, qtype))
        dw = _einsum(for_w, scales, (g, bwd_qtype), (x, qtype))
    # As of a product that is not rounded: summed over devices in the dtype of activations.
    return dx.astype(x.dtype), dw.astype(x.dtype).astype(w.dtype)


quantized_einsum.defvjp(_forward, _backward)


def _einsum(equation: str, scales: str, *factors: tuple[jax.Array, str]) -> jax.Array:
    """Returns the float32 product of factors, each rounded to its type.

    A factor has a scale for each index that the product keeps, or a single scale.
    """
    qwix = optional_module("qwix", "quantized")
    letters, outputs = equation.split("->")
    rounded = [
        qwix.quantize(
            factor.astype(jnp.float32),
            jnp.dtype(qtype),
            channelwise_axes=[
                i for i, letter in enumerate(local) if letter in outputs and scales == "channel"
            ],
            calibration_method=_CALIBRATION[qtype],
        )
        for local, (factor, qtype) in zip(letters.split(","), factors, strict=True)
    ]
    return qwix.einsum(equation, *rounded)


@dataclasses.dataclass(frozen=True)
class RoundedProduct(Product):
    """The product of inputs and weight, both rounded: see QuantizationRule."""

    qtype: str
    bwd_qtype: str | None
    scales: str = "channel"

    def multiplied(self, layer: Dense, inputs: jax.Array) -> jax.Array:
        equation = layer.equation
        free = [letter for letter in string.ascii_letters if letter not in equation]
        num_leading = inputs.ndim - len(equation.partition(",")[0].replace("...", ""))
        return quantized_einsum(
            equation.replace("...", "".join(free[:num_leading])), self.qtype, self.bwd_qtype,
            inputs, layer.kernel(layer.w.dtype), self.scales,
        )

    def factors(self, layer: Dense, inputs: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        raise ConfigError(
            "A softmax with a chunk_size cuts the weight of its linear layer, which a rule rounds "
            f"to {self.qtype}. Set chunk_size to None, or put "
            'QuantizationRule("softmax", qtype=None) before the other rules.'
        )

    def adds_up(self) -> bool:
        return False


@dataclasses.dataclass(frozen=True)
class RoundedWeight(Product):
    """The product of inputs with a weight that is rounded in blocks: see QuantizationRule."""

    qtype: str
    block_size: int

    def multiplied(self, layer: Dense, inputs: jax.Array) -> jax.Array:
        w = self.kernel(layer).astype(inputs.dtype)
        return jnp.einsum(in_order(layer.equation), inputs, w)

    def kernel(self, layer: Dense) -> jax.Array:
        w = layer.kernel(layer.w.dtype)
        operands, outputs = layer.equation.split("->")
        letters = operands.split(",")[1]
        *_, last = (i for i, letter in enumerate(letters) if letter not in outputs)
        # The rounded value, with the gradient of the other.
        rounded = in_4_bits(
            jax.lax.stop_gradient(w), self.qtype, self.block_size, last - w.ndim
        ).astype(w.dtype)
        return rounded + (w - jax.lax.stop_gradient(w))

    def factors(self, layer: Dense, inputs: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        return [(inputs, self.kernel(layer))]

    def column_factors(self, layer: Dense) -> list[tuple[jax.Array, jax.Array | None]]:
        return [(self.kernel(layer).T, None)]

    def adds_up(self) -> bool:
        return False
