"""Products of dense layers with rounded factors, by Qwix: in 8 bits, or of weights in 4."""

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
from praxis_lite.layers.whole_model.four_bit_weights import in_4_bits

QTYPES = ("int8", "float8_e4m3fn", "float8_e5m2")
# Of a factor: one for each row or column that a product keeps, or one for all.
SCALES = ("channel", "tensor")
# The number of devices that sum over a letter of an equation.
Counts = tuple[tuple[str, int], ...]
# The largest int8 is 127. Qwix's own bound of 127.5 puts each row's largest element between two
# integers, where the last bit of a float decides, which may differ from mesh to mesh.
_CALIBRATION = dict.fromkeys(QTYPES, "absmax") | {"int8": f"absmax,{127.5 / 127}"}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 5, 6, 7))
def quantized_einsum(
    equation: str, qtype: str, bwd_qtype: str | None, x: jax.Array, w: jax.Array,
    scales: str = "channel", num_devices: Counts = (), out: PartitionSpec | None = None,
) -> jax.Array:
    """Returns `einsum(equation, x, w)` of rounded factors, in x's dtype.

    Args:
      equation: "bd,df->bf": two factors, each letter in two of the three.
      qtype, bwd_qtype, scales: see QuantizationRule.
      num_devices: of `summing_devices`.
      out: of the result's type over Explicit axes, else None.
    """
    return _einsum(equation, scales, num_devices, x.dtype, out, (x, qtype), (w, qtype))


def _forward(
    equation: str, qtype: str, bwd_qtype: str | None, x: jax.Array, w: jax.Array, *settings: Any
):
    return quantized_einsum(equation, qtype, bwd_qtype, x, w, *settings), (x, w)


def _backward(
    equation: str, qtype: str, bwd_qtype: str | None, scales: str, num_devices: Counts,
    out: PartitionSpec | None, residuals: tuple, g: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    x, w = residuals
    factors, outputs = equation.split("->")
    of_x, of_w = factors.split(",")
    for_x, for_w = f"{outputs},{of_w}->{of_x}", f"{outputs},{of_x}->{of_w}"
    as_x, as_w = (None, None) if out is None else (type_spec(x), type_spec(w))
    if bwd_qtype is None:
        dx = jnp.einsum(for_x, g, w.astype(g.dtype), out_sharding=as_x)
        dw = jnp.einsum(for_w, g, x, out_sharding=as_w)
    else:
        dx = _einsum(for_x, scales, num_devices, x.dtype, as_x, (g, bwd_qtype), (w, qtype))
        dw = _einsum(for_w, scales, num_devices, x.dtype, as_w, (g, bwd_qtype), (x, qtype))
    # As of a product that is not rounded: summed over devices in the dtype of activations.
    return dx.astype(x.dtype), dw.astype(x.dtype).astype(w.dtype)


quantized_einsum.defvjp(_forward, _backward)


def _einsum(
    equation: str, scales: str, num_devices: Counts, dtype: Any, out: PartitionSpec | None,
    *factors: tuple[jax.Array, str],
) -> jax.Array:
    """Returns the product of factors, each rounded to its type, in `dtype`.

    A factor has a scale for each index that the product keeps, or a single scale. Devices that sum
    over an index together do so in `dtype`: without parts XLA would sum int32, before the scales.

    Args:
      out: of the product's type; None over Auto axes.
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
    size_of = dict(zip(letters.partition(",")[0], factors[0][0].shape, strict=True))
    parts = {  # Of what is summed, where devices have equal ones.
        letter: count for letter, count in num_devices
        if letter not in outputs and size_of[letter] % count == 0
    }
    if not parts:
        return _product(equation, out, *rounded).astype(dtype)
    numbers = dict(zip(parts, string.ascii_uppercase, strict=False))
    rounded = [
        jax.tree.map(functools.partial(_in_parts, local, parts), factor)
        for local, factor in zip(letters.split(","), rounded, strict=True)
    ]
    apart = letters.translate(str.maketrans({x: numbers[x] + x for x in parts}))
    apart = f"{apart}->{''.join(numbers.values())}{outputs}"
    of_parts = None if out is None else _beside_parts(out, apart, *(x.qvalue for x in rounded))
    product = _product(apart, of_parts, *rounded).astype(dtype)
    product = jax.lax.reduce(product, jnp.zeros((), dtype), jax.lax.add, range(len(parts)))
    return product if out is None else jax.sharding.reshard(product, out)


def _beside_parts(
    out: PartitionSpec, equation: str, x: jax.Array, y: jax.Array
) -> PartitionSpec:
    """Returns the type of a product that is still in parts: its other dims lack the parts' axes."""
    of_all = dict(zip(equation.partition("->")[2], product_type(equation, x, y), strict=True))
    parts = list(of_all.values())[: len(of_all) - len(out)]
    used = {axis for entry in parts for axis in axes_of(entry)}
    left = (entry_of(tuple(a for a in axes_of(entry) if a not in used)) for entry in out)
    return PartitionSpec(*parts, *left)


def _product(equation: str, out: PartitionSpec | None, x: Any, y: Any) -> jax.Array:
    """Returns the product of rounded factors, times their scales.

    Args:
      out: of its type; None over Auto axes.
    """
    qwix = optional_module("qwix", "quantized")
    factors, outputs = equation.split("->")
    of_x, of_y = factors.split(",")
    shared = [letter for letter in of_y if letter in of_x]
    summed = [letter for letter in shared if letter not in outputs]
    batch = [letter for letter in shared if letter in outputs]
    # As dot_general orders them; the second factor comes first, as in qwix.einsum.
    order = [*batch, *(a for a in of_y if a not in shared), *(a for a in of_x if a not in shared)]
    settings = {}
    if out is not None:
        entries = dict(zip(outputs, out, strict=True))
        x, y = (
            dataclasses.replace(factor, scale=jax.sharding.reshard(
                factor.scale, PartitionSpec(*(
                    entries.get(a) if size > 1 else None
                    for a, size in zip(local, factor.scale.shape, strict=True)
                ))
            ))
            for local, factor in ((of_x, x), (of_y, y))
        )
        settings["out_sharding"] = PartitionSpec(*(entries[letter] for letter in order))
    dims = tuple(
        tuple(tuple(map(local.index, group)) for local in (of_y, of_x)) for group in (summed, batch)
    )
    product = qwix.dot_general(y, x, dims, **settings)
    return product.transpose([order.index(letter) for letter in outputs])


def _in_parts(letters: str, parts: dict[str, int], x: jax.Array) -> jax.Array:
    """Returns an array whose dims have a dim of parts before them; one of a scale has one part.

    Over Explicit axes parts split as the dim did.
    """
    shape, split, sizes = [], [], jax.sharding.get_abstract_mesh().shape
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
    """The product of inputs and weight, both rounded.

    Attributes:
      qtype, bwd_qtype, scales: see QuantizationRule.
      rows_split: how the rows of the inputs split: their batch, and time.
    """

    qtype: str
    bwd_qtype: str | None
    scales: str = "channel"
    rows_split: SplitDims = None

    def multiplied(self, layer: Dense, inputs: jax.Array) -> jax.Array:
        equation = layer.equation
        free = [letter for letter in string.ascii_letters if letter not in equation]
        num_leading = inputs.ndim - len(equation.partition(",")[0].replace("...", ""))
        rows = "".join(free[:num_leading])
        equation, w = equation.replace("...", rows), elementwise(layer.kernel(layer.w.dtype))
        return quantized_einsum(
            equation, self.qtype, self.bwd_qtype, inputs, w, self.scales,
            summing_devices(layer, rows, self.rows_split),
            self._type(equation, rows, inputs, w) if is_typed() else None,
        )

    def _type(self, equation: str, rows: str, x: jax.Array, w: jax.Array) -> PartitionSpec:
        """Returns a spec of the product's type: its rows split as declared, where axes are free.

        Then the gradient arrives so, and is gathered after it was rounded.
        """
        outputs, out = equation.partition("->")[2], product_type(equation, x, w)
        axis_names = jax.sharding.get_abstract_mesh().axis_names
        declared = to_partition_spec(self.rows_split or (), axis_names)
        of_rows = dict(zip(rows, declared, strict=False))
        used, split = {axis for entry in out for axis in axes_of(entry)}, []
        for letter, entry in zip(outputs, out, strict=True):
            free = tuple(a for a in axes_of(of_rows.get(letter)) if a not in used)
            used.update(free)
            split.append(entry if entry else entry_of(free))
        return PartitionSpec(*split)

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
        return einsum(in_order(layer.equation), inputs, w)

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


def summing_devices(layer: Dense, rows: str, rows_split: SplitDims) -> Counts:
    """Returns the number of devices that hold parts of a sum, by the letter that is summed over.

    Over the weight's letters go the products that make outputs and gradients of inputs, over those
    of rows the product that makes the weight's gradient. A letter without an entry is whole, or is
    gathered before the product: a weight is, over the axes that split the batch, and its model dims
    over those that split time, too. The others are whole where tokens meet all of them.

    Args:
      rows: the letters of the inputs' rows: the batch's, and time's.
      rows_split: how they split; None: unknown.
    """
    mesh, metadata = jax.sharding.get_abstract_mesh(), layer.w.get_metadata()

    def axes_by(letters: Sequence[str], mapping: SplitDims) -> dict[str, set[str]]:
        spec = without_axes(to_partition_spec(mapping or (), mesh.axis_names), mesh.manual_axes)
        return {x: set(axes_of(entry)) for x, entry in zip(letters, spec, strict=False)}

    if mesh.empty:
        return ()
    of_rows = axes_by(rows, rows_split)
    of_batch, of_all = of_rows.get(rows[:1], set()), set().union(*of_rows.values())
    firsts = [letters[0] for letters in layer.letters]
    of_w = axes_by(firsts, metadata.get("split_dims_mapping"))
    for letter, name in zip(firsts, metadata.get("dim_names", ()), strict=False):
        if letter in of_w:
            of_w[letter] -= of_all if name == MODEL_DIMS else of_batch
    of_products = set().union(*of_w.values())
    axes = of_w | {letter: split - of_products for letter, split in of_rows.items()}
    counts = {x: math.prod(mesh.shape[axis] for axis in split) for x, split in axes.items()}
    return tuple((letter, count) for letter, count in counts.items() if count > 1)
