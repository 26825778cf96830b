"""Finds matmuls whose results XLA's partitioner may permute, in programs before compilation.

On a mesh of three axes XLA silently returns wrong results of some products
(docs/upstream/matmul_rows.md). If an axis that is summed over also splits the results, it groups
devices by that axis, and numbers the devices of a group by their order in the larger operand and by
their order in the results. If these differ, parts of the results may be permuted.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import sdy, stablehlo

PRODUCT = "stablehlo.dot_general"
_NUMBER = "number"  # An attribute of products, for as long as they are looked at.
# The mesh axes, of several devices, that split each dim of an array.
Spec = list[tuple[str, ...]]


class Conflict(NamedTuple):
    """Two orders of a product's devices.

    Attributes:
      summed: the axes that are summed over, and split the results.
      before: the other axes, as an operand has them.
      after: as the results have them.
    """

    summed: list[str]
    before: list[str]
    after: list[str]


class Split:
    """How an array splits.

    Attributes:
      sharding: Shardy's, or None if the array is whole.
      spec: the axes that split each dim.
      bits: of a part.
    """

    def __init__(self, value: Any, sizes: Mapping[str, int]):
        value = ir.Value(value)
        shape = ir.RankedTensorType(value.type)
        self.sharding = sharding = _sharding(value)
        dims = [()] * shape.rank if sharding is None else [
            tuple(sdy.AxisRefAttr(axis).name for axis in sdy.DimensionShardingAttr(dim).axes)
            for dim in sharding.dimension_shardings
        ]
        self.spec: Spec = [tuple(axis for axis in dim if axis in sizes) for dim in dims]
        width = int(re.findall(r"\d+", str(shape.element_type))[0])
        used = {axis for dim in self.spec for axis in dim}
        self.bits = math.prod(shape.shape) * width / math.prod(sizes[axis] for axis in used)


class Product:
    """A matrix product of a program after propagation, in which each function has one call.

    Args:
      op: the product.
      sizes: of the mesh axes of several devices.
      calls: by the name of a function.

    Attributes:
      lhs, rhs, result: how its operands and its results split.
      shardings: of the three, to compare.
      sizes: of the mesh axes of several devices that are not manual here.
      name: its name scopes.
    """

    def __init__(self, op: Any, sizes: Mapping[str, int], calls: Mapping[str, Any]):
        manual_axes = _manual_axes(op, calls)
        self.sizes = {axis: size for axis, size in sizes.items() if axis not in manual_axes}
        values = (*op.operands, op.results[0])
        self.lhs, self.rhs, self.result = (Split(value, self.sizes) for value in values)
        self.shardings = [str(x.sharding) for x in (self.lhs, self.rhs, self.result)]
        self._dims = stablehlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
        names = re.search(r'"([^"]*)"', str(op.location))
        self.name = names[1] if names else "without a name"

    def conflict(self, spec: Spec) -> Conflict | None:
        """Returns the two orders if the results split by `spec`; None: XLA has but one."""
        used = {axis for entry in spec for axis in entry}
        whole = math.prod(size for axis, size in self.sizes.items() if axis not in used)
        # XLA lays out the smaller operand as the larger one.
        operand, summed = (
            (self.lhs, self._dims.lhs_contracting_dimensions) if self.lhs.bits > self.rhs.bits
            else (self.rhs, self._dims.rhs_contracting_dimensions)
        )
        for some in _parts(list(summed)):
            axes = {axis for dim in some for axis in operand.spec[dim]}
            of_results = [dim for dim, entry in enumerate(spec) if entry and axes.issuperset(entry)]
            if not axes or axes != {axis for dim in of_results for axis in spec[dim]}:
                continue
            if whole > 1 and whole % math.prod(self.sizes[axis] for axis in axes) == 0:
                continue  # Of results that are whole over as many devices XLA orders these.
            before, after = self._axes(operand.spec, some), self._axes(spec, of_results)
            if before != after:
                return Conflict([axis for axis in self.sizes if axis in axes], before, after)
        return None

    def _axes(self, spec: Spec, but: Any) -> list[str]:
        """Returns the axes of the dims that are not in `but`, then those that split no dim."""
        used = {axis for entry in spec for axis in entry}
        axes = [axis for dim, entry in enumerate(spec) if dim not in but for axis in entry]
        return axes + [axis for axis in self.sizes if axis not in used]


def products_at_risk(module: Any, sizes: Mapping[str, int]) -> dict[int, list[Product]]:
    """Returns the products that XLA may permute, by their numbers among all of the module.

    Shardy copies a function for each of its calls: all copies of its product are returned.

    Args:
      sizes: of the mesh axes of several devices.

    Raises:
      ir.MLIRError, ValueError: Shardy does not read the module.
    """
    program = module.operation.clone()
    for number, op in enumerate(ops(program, PRODUCT)):
        op.attributes[_NUMBER] = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), number)
    passmanager.PassManager.parse("builtin.module(sdy-propagation-pipeline)").run(program)
    calls = {
        ir.FlatSymbolRefAttr(call.attributes["callee"]).value: call
        for call in ops(program, "func.call")
    }
    copies: dict[int, list[Product]] = {}
    for op in ops(program, PRODUCT):
        number = ir.IntegerAttr(op.attributes[_NUMBER]).value
        copies.setdefault(number, []).append(Product(op, sizes, calls))
    return {
        number: same for number, same in copies.items()
        if any(product.conflict(product.result.spec) for product in same)
    }


def ops(op: Any, name: str) -> Iterator[Any]:
    """Yields the operations of a name in an operation's regions."""
    for block in itertools.chain.from_iterable(op.regions):
        for inner in block:
            if inner.operation.name == name:
                yield inner.operation
            yield from ops(inner.operation, name)


def _parts(dims: list[int]) -> Iterator[tuple[int, ...]]:
    """Yields each choice of one or more of the dims that are summed: XLA may group by some."""
    for count in range(len(dims), 0, -1):
        yield from itertools.combinations(dims, count)


def _sharding(value: Any) -> Any:
    """Returns the sharding of a value after propagation, or None if the value is whole."""
    if isinstance(value.owner, ir.Block):
        number, op = ir.BlockArgument(value).arg_number, value.owner.owner.operation
        name = {"sdy.manual_computation": "in_shardings"}.get(op.name, "sdy.sharding")
        if op.name == "func.func":
            if "arg_attrs" not in op.attributes:
                return None
            of_argument = ir.DictAttr(ir.ArrayAttr(op.attributes["arg_attrs"])[number])
            return sdy.TensorShardingAttr(of_argument[name]) if name in of_argument else None
    else:
        number, op = ir.OpResult(value).result_number, value.owner
        name = {"sdy.manual_computation": "out_shardings"}.get(op.name, "sdy.sharding")
        if "sharding" in op.attributes:  # It states one.
            return sdy.TensorShardingAttr(op.attributes["sharding"])
    if name not in op.attributes:
        return None
    of_values = sdy.TensorShardingPerValueAttr(op.attributes[name])
    return sdy.TensorShardingAttr(of_values.shardings[number])


def _manual_axes(op: Any, calls: Mapping[str, Any]) -> set[str]:
    axes: set[str] = set()
    while (op := op.parent) is not None:
        if op.name == "func.func":
            op = calls.get(ir.StringAttr(op.attributes["sym_name"]).value, op)
        if op.name == "sdy.manual_computation":
            axes.update(sdy.ManualAxesAttr(op.attributes["manual_axes"]))
    return axes


def axes_text(axes: list[str]) -> str:
    """Returns the names of axes, each in quotation marks."""
    return ", ".join(f"'{axis}'" for axis in axes)
