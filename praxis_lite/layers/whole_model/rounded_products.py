"""Matmuls of dense layers with 8-bit operands, using Qwix, or with 4-bit weights."""

import dataclasses
import functools
import math
import string
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.sharding.devices.axis_types import is_typed, type_spec
from praxis_lite.core.sharding.logical_axes import axes_of, entry_of
from praxis_lite.core.sharding.split_dims import SplitDims, to_partition_spec, without_axes
from praxis_lite.host.optional_packages import optional_module
from praxis_lite.layers.base.dense import Dense, Product, in_order
from praxis_lite.layers.base.dims import MODEL_DIMS
from praxis_lite.layers.base.result_types import einsum, elementwise, product_type
from praxis_lite.layers.whole_model.four_bit_weights import to_4_bits

QTYPES = ("int8", "float8_e4m3fn", "float8_e5m2")
# The scales of an operand: one per index that is not contracted, or a single scale.
SCALES = ("channel", "tensor")
# Pairs of a subscript in an equation and the number of devices that sum over its dim.
Counts = tuple[tuple[str, int], ...]
# The largest int8 is 127. With Qwix's default bound of 127.5, each row's largest element would be
# halfway between two integers, so that the last bit of a float, which may differ between meshes,
# would decide the rounding.
_CALIBRATION = dict.fromkeys(QTYPES, "absmax") | {"int8": f"absmax,{127.5 / 127}"}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 5, 6, 7))
def quantized_einsum(
    equation: str,
    qtype: str,
    bwd_qtype: str | None,
    x: jax.Array,
    w: jax.Array,
    scales: str = "channel",
    num_devices: Counts = (),
    out: PartitionSpec | None = None,
) -> jax.Array:
    """Computes `einsum(equation, x, w)` with rounded operands, in x's dtype.

    Args:
      equation: An equation with two operands, such as "bd,df->bf". Each subscript occurs in two of
        the three arrays.
      qtype: See QuantizationRule.
      bwd_qtype: See QuantizationRule.
      x: The inputs.
      w: The weight.
      scales: See QuantizationRule.
      num_devices: The result of `summing_devices`.
      out: The spec of the result's type over Explicit axes, or None.
    """
    return _einsum(equation, scales, num_devices, x.dtype, out, (x, qtype), (w, qtype))


def _forward(
    equation: str, qtype: str, bwd_qtype: str | None, x: jax.Array, w: jax.Array, *settings: Any
):
    return quantized_einsum(equation, qtype, bwd_qtype, x, w, *settings), (x, w)


def _backward(
    equation: str,
    qtype: str,
    bwd_qtype: str | None,
    scales: str,
    num_devices: Counts,
    out: PartitionSpec | None,
    residuals: tuple,
    g: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    x, w = residuals
    factors, outputs = equation.split("->")
    x_letters, w_letters = factors.split(",")
    dx_equation = f"{outputs},{w_letters}->{x_letters}"
    dw_equation = f"{outputs},{x_letters}->{w_letters}"
    x_spec, w_spec = (None, None) if out is None else (type_spec(x), type_spec(w))
    if bwd_qtype is None:
        dx = jnp.einsum(dx_equation, g, w.astype(g.dtype), out_sharding=x_spec)
        dw = jnp.einsum(dw_equation, g, x, out_sharding=w_spec)
    else:
        settings = scales, num_devices, x.dtype
        dx = _einsum(dx_equation, *settings, x_spec, (g, bwd_qtype), (w, qtype))
        dw = _einsum(dw_equation, *settings, w_spec, (g, bwd_qtype), (x, qtype))
    # Like unrounded matmuls, these are summed over devices in the activations' dtype.
    return dx.astype(x.dtype), dw.astype(x.dtype).astype(w.dtype)


quantized_einsum.defvjp(_forward, _backward)


def _einsum(
    equation: str,
    scales: str,
    num_devices: Counts,
    dtype: Any,
    out: PartitionSpec | None,
    *factors: tuple[jax.Array, str],
) -> jax.Array:
    """Multiplies two operands, each rounded to its type; returns the result in `dtype`.

    An operand has a scale per index that is not contracted, or a single scale. If several devices
    sum over a contracted dim, the dim is divided into one part per device. The parts are summed
    after rescaling, in `dtype`; otherwise XLA would sum int32 values over devices before applying
    the scales.

    Args:
      equation: See `quantized_einsum`.
      scales: See QuantizationRule.
      num_devices: The result of `summing_devices`.
      dtype: The dtype of the result.
      out: The spec of the product's type; None over Auto axes.
      factors: The two operands, each with the type to round to.
    """
    qwix = optional_module("qwix", "quantized")
    letters, outputs = equation.split("->")
    rounded = [
        qwix.quantize(
            factor.astype(jnp.float32),
            jnp.dtype(qtype),
            channelwise_axes=[
                i
                for i, letter in enumerate(subscripts)
                if letter in outputs and scales == "channel"
            ],
            calibration_method=_CALIBRATION[qtype],
        )
        for subscripts, (factor, qtype) in zip(letters.split(","), factors, strict=True)
    ]
    size_of = dict(zip(letters.partition(",")[0], factors[0][0].shape, strict=True))
    parts = {  # The number of parts per contracted dim, if the dim divides evenly.
        letter: count
        for letter, count in num_devices
        if letter not in outputs and size_of[letter] % count == 0
    }
    # If no dim is summed over several devices, a single product with its scales suffices.
    if not parts:
        return _product(equation, out, *rounded).astype(dtype)
    # Give each part an uppercase subscript, which the product keeps. The sum over parts follows
    # after the scales have been applied.
    part_letters = dict(zip(parts, string.ascii_uppercase, strict=False))
    rounded = [
        jax.tree.map(functools.partial(_split_dims, subscripts, parts), factor)
        for subscripts, factor in zip(letters.split(","), rounded, strict=True)
    ]
    first_letters = {ord(x): part_letters[x] + x for x in parts}
    equation = letters.translate(first_letters)
    equation = f"{equation}->{''.join(part_letters.values())}{outputs}"
    spec = None if out is None else _partial_sums_spec(out, equation, *(x.qvalue for x in rounded))
    product = _product(equation, spec, *rounded).astype(dtype)
    product = jax.lax.reduce(product, jnp.zeros((), dtype), jax.lax.add, range(len(parts)))
    return product if out is None else jax.sharding.reshard(product, out)


def _partial_sums_spec(
    out: PartitionSpec, equation: str, x: jax.Array, y: jax.Array
) -> PartitionSpec:
    """Returns the spec of partial sums: the parts' axes, followed by `out` without these axes."""
    entry_of_letter = dict(
        zip(equation.partition("->")[2], product_type(equation, x, y), strict=True)
    )
    parts = list(entry_of_letter.values())[: len(entry_of_letter) - len(out)]
    used = {axis for entry in parts for axis in axes_of(entry)}
    rest = (entry_of(tuple(a for a in axes_of(entry) if a not in used)) for entry in out)
    return PartitionSpec(*parts, *rest)


def _product(equation: str, out: PartitionSpec | None, x: Any, y: Any) -> jax.Array:
    """Multiplies rounded operands, and applies their scales.

    Args:
      equation: See `quantized_einsum`.
      out: The spec of the product's type; None over Auto axes.
      x: The first operand.
      y: The second operand.
    """
    qwix = optional_module("qwix", "quantized")
    factors, outputs = equation.split("->")
    x_letters, y_letters = factors.split(",")
    shared = [letter for letter in y_letters if letter in x_letters]
    summed = [letter for letter in shared if letter not in outputs]
    batch = [letter for letter in shared if letter in outputs]
    # The order of dims in dot_general's result; as in qwix.einsum, the second operand comes first.
    order = [
        *batch,
        *(a for a in y_letters if a not in shared),
        *(a for a in x_letters if a not in shared),
    ]
    settings = {}
    # Over Explicit axes, the scales multiply the product, so they must be sharded like its dims.
    if out is not None:
        entries = dict(zip(outputs, out, strict=True))
        x, y = (
            dataclasses.replace(
                factor,
                scale=jax.sharding.reshard(
                    factor.scale,
                    PartitionSpec(
                        *(
                            entries.get(a) if size > 1 else None
                            for a, size in zip(subscripts, factor.scale.shape, strict=True)
                        )
                    ),
                ),
            )
            for subscripts, factor in ((x_letters, x), (y_letters, y))
        )
        settings["out_sharding"] = PartitionSpec(*(entries[letter] for letter in order))
    # For dot_general: ((summed dims of y, of x), (batch dims of y, of x)).
    dims = tuple(
        tuple(tuple(map(subscripts.index, group)) for subscripts in (y_letters, x_letters))
        for group in (summed, batch)
    )
    product = qwix.dot_general(y, x, dims, **settings)
    return product.transpose([order.index(letter) for letter in outputs])


def _split_dims(letters: str, parts: dict[str, int], x: jax.Array) -> jax.Array:
    """Reshapes some dims of an array to [number of parts, size of a part].

    A dim of size 1, as scales have, becomes [1, 1]. Over Explicit axes, the dim of parts is sharded
    like the original dim.
    """
    shape: list[int] = []
    split: list[Any] = []
    sizes = jax.sharding.get_abstract_mesh().shape
    for letter, size, entry in zip(letters, x.shape, type_spec(x), strict=True):
        if letter not in parts:
            shape, split = [*shape, size], [*split, entry]
            continue
        count = min(parts[letter], size)
        is_even = count % math.prod(sizes[axis] for axis in axes_of(entry)) == 0
        shape, split = [*shape, count, size // count], [*split, entry if is_even else None, None]
    return jnp.reshape(x, shape, out_sharding=PartitionSpec(*split) if is_typed() else None)


@dataclasses.dataclass(frozen=True)
class RoundedProduct(Product):
    """A matmul that rounds inputs and weight.

    Attributes:
      qtype: See QuantizationRule.
      bwd_qtype: See QuantizationRule.
      scales: See QuantizationRule.
      rows_split: Sharding of the inputs' batch and time.
    """

    qtype: str
    bwd_qtype: str | None
    scales: str = "channel"
    rows_split: SplitDims = None

    def multiplied(self, layer: Dense, inputs: jax.Array) -> jax.Array:
        equation = layer.equation
        # Replace "..." with unused subscripts, one per leading dim of the inputs.
        free = [letter for letter in string.ascii_letters if letter not in equation]
        num_leading = inputs.ndim - len(equation.partition(",")[0].replace("...", ""))
        rows = "".join(free[:num_leading])
        equation, w = equation.replace("...", rows), elementwise(layer.kernel(layer.w.dtype))
        return quantized_einsum(
            equation,
            self.qtype,
            self.bwd_qtype,
            inputs,
            w,
            self.scales,
            summing_devices(layer, rows, self.rows_split),
            self._type(equation, rows, inputs, w) if is_typed() else None,
        )

    def _type(self, equation: str, rows: str, x: jax.Array, w: jax.Array) -> PartitionSpec:
        """Returns the spec of the product's type.

        Batch and time are sharded over the declared axes that are not in use. The incoming gradient
        then has this sharding, and is gathered after rounding.
        """
        outputs, out = equation.partition("->")[2], product_type(equation, x, w)
        axis_names = jax.sharding.get_abstract_mesh().axis_names
        declared = to_partition_spec(self.rows_split or (), axis_names)
        row_entries = dict(zip(rows, declared, strict=False))
        used, split = {axis for entry in out for axis in axes_of(entry)}, []
        for letter, entry in zip(outputs, out, strict=True):
            free = tuple(a for a in axes_of(row_entries.get(letter)) if a not in used)
            used.update(free)
            split.append(entry if entry else entry_of(free))
        return PartitionSpec(*split)

    def factors(self, layer: Dense, inputs: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        raise ConfigError(
            f"A rule rounds the weight of a softmax to {self.qtype}, but a softmax with a "
            "chunk_size slices this weight and cannot be quantized. Set chunk_size to None, or put "
            'QuantizationRule("softmax", qtype=None) before the other rules.'
        )

    def is_sum_of_shards(self) -> bool:
        return False


@dataclasses.dataclass(frozen=True)
class RoundedWeight(Product):
    """A matmul that rounds only the weight, in blocks.

    Attributes:
      qtype: See QuantizationRule.
      block_size: See QuantizationRule.
    """

    qtype: str
    block_size: int

    def multiplied(self, layer: Dense, inputs: jax.Array) -> jax.Array:
        w = self.kernel(layer).astype(inputs.dtype)
        return einsum(in_order(layer.equation), inputs, w)

    def kernel(self, layer: Dense) -> jax.Array:
        w = layer.kernel(layer.w.dtype)
        operands, outputs = layer.equation.split("->")
        letters = operands.split(",")[1]
        *_, last = (i for i, letter in enumerate(letters) if letter not in outputs)
        # The value of the rounded weight, with the gradient of the unrounded weight.
        rounded = to_4_bits(
            jax.lax.stop_gradient(w), self.qtype, self.block_size, last - w.ndim
        ).astype(w.dtype)
        return rounded + (w - jax.lax.stop_gradient(w))

    def is_sum_of_shards(self) -> bool:
        return False


def summing_devices(layer: Dense, rows: str, rows_split: SplitDims) -> Counts:
    """Returns the number of devices over which each contracted dim is summed.

    The matmuls for outputs and input gradients contract dims of the weight; the matmul for weight
    gradients contracts batch and time. A dim without an entry is not sharded, or is gathered before
    the matmul: a weight is gathered over the axes of the batch, and its model dims also over the
    axes of time.

    Args:
      layer: The dense layer.
      rows: The subscripts of the inputs' batch and time.
      rows_split: Sharding of batch and time, or None if unknown.
    """
    mesh, metadata = jax.sharding.get_abstract_mesh(), layer.w.get_metadata()

    def axes_by(letters: Sequence[str], mapping: SplitDims) -> dict[str, set[str]]:
        spec = without_axes(to_partition_spec(mapping or (), mesh.axis_names), mesh.manual_axes)
        return {x: set(axes_of(entry)) for x, entry in zip(letters, spec, strict=False)}

    if mesh.empty:
        return ()
    # Mesh axes of each subscript. Axes over which the weight is gathered are removed from the
    # weight's dims.
    row_axes = axes_by(rows, rows_split)
    batch_axes, all_row_axes = row_axes.get(rows[:1], set()), set().union(*row_axes.values())
    firsts = [letters[0] for letters in layer.letters]
    w_axes = axes_by(firsts, metadata.get("split_dims_mapping"))
    for letter, name in zip(firsts, metadata.get("dim_names", ()), strict=False):
        if letter in w_axes:
            w_axes[letter] -= all_row_axes if name == MODEL_DIMS else batch_axes
    product_axes = set().union(*w_axes.values())
    axes = w_axes | {letter: split - product_axes for letter, split in row_axes.items()}
    counts = {x: math.prod(mesh.shape[axis] for axis in split) for x, split in axes.items()}
    return tuple((letter, count) for letter, count in counts.items() if count > 1)
