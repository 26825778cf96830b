"""Finds the matmuls in an MLIR module whose results XLA's partitioner may permute.

On a mesh with three axes, XLA silently returns wrong results for some matmuls
(docs/upstream/matmul_rows.md). If a contracted axis also splits the results, XLA groups devices by
that axis. It numbers the devices in each group twice: by their order in the larger operand and by
their order in the results. If these orders differ, parts of the results may be permuted.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import sdy, stablehlo

PRODUCT = "stablehlo.dot_general"
_NUMBER = "number"  # Temporary attribute that identifies matmuls across propagation.
# For each dim of an array, the mesh axes (with more than one device) that split that dim.
Spec = list[tuple[str, ...]]


class Conflict(NamedTuple):
    """The two different device orders of a matmul whose results XLA may permute.

    Attributes:
      summed: Contracted axes that also split the results.
      before: The remaining axes in the order of an operand.
      after: The remaining axes in the order of the results.
    """

    summed: list[str]
    before: list[str]
    after: list[str]


class Split:
    """The sharding of an array.

    Attributes:
      sharding: Shardy's sharding, or None if the array is replicated.
      spec: Mesh axes per dim.
      bits: Size of a shard in bits.
    """

    def __init__(self, value: Any, sizes: Mapping[str, int]):
        value = ir.Value(value)
        shape = ir.RankedTensorType(value.type)
        self.sharding = sharding = _sharding(value)
        dims = (
            [()] * shape.rank
            if sharding is None
            else [
                tuple(sdy.AxisRefAttr(axis).name for axis in sdy.DimensionShardingAttr(dim).axes)
                for dim in sharding.dimension_shardings
            ]
        )
        self.spec: Spec = [tuple(axis for axis in dim if axis in sizes) for dim in dims]
        width = int(re.findall(r"\d+", str(shape.element_type))[0])
        used = {axis for dim in self.spec for axis in dim}
        self.bits = math.prod(shape.shape) * width / math.prod(sizes[axis] for axis in used)


class Product:
    """A matmul after sharding propagation, which copies a function for each of its calls.

    Args:
      op: The matmul.
      sizes: Sizes of the mesh axes with more than one device.
      calls: Maps the name of a function to its call.

    Attributes:
      lhs: Sharding of the left operand.
      rhs: Sharding of the right operand.
      result: Sharding of the results.
      shardings: The three shardings as text, for comparison.
      sizes: Sizes of the mesh axes that have more than one device and are not manual.
      name: Name scopes of the matmul.
    """

    def __init__(self, op: Any, sizes: Mapping[str, int], calls: Mapping[str, Any]):
        manual_axes = _manual_axes(op, calls)
        self.sizes = {axis: size for axis, size in sizes.items() if axis not in manual_axes}
        values = (*op.operands, op.results[0])
        self.lhs, self.rhs, self.result = (Split(value, self.sizes) for value in values)
        self.shardings = [str(x.sharding) for x in (self.lhs, self.rhs, self.result)]
        self._dims = stablehlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
        names = re.search(r'"([^"]*)"', str(op.location))
        self.name = names[1] if names else "(unnamed)"

    def conflict(self, spec: Spec) -> Conflict | None:
        """Returns the conflicting device orders for results split by `spec`, or None.

        There is a conflict if some contracted dims of the larger operand are split over exactly the
        axes that split some dims of the results, and the remaining axes have a different order in
        the operand than in the results.
        """
        used = {axis for entry in spec for axis in entry}
        num_replicas = math.prod(size for axis, size in self.sizes.items() if axis not in used)
        # XLA lays out the smaller operand like the larger one.
        operand, summed = (
            (self.lhs, self._dims.lhs_contracting_dimensions)
            if self.lhs.bits > self.rhs.bits
            else (self.rhs, self._dims.rhs_contracting_dimensions)
        )
        for dims in _subsets(list(summed)):
            axes = {axis for dim in dims for axis in operand.spec[dim]}
            result_dims = [
                dim for dim, entry in enumerate(spec) if entry and axes.issuperset(entry)
            ]
            if not axes or axes != {axis for dim in result_dims for axis in spec[dim]}:
                continue
            if num_replicas > 1 and num_replicas % math.prod(self.sizes[x] for x in axes) == 0:
                continue  # XLA orders the replicas of the results instead.
            before, after = self._axes(operand.spec, dims), self._axes(spec, result_dims)
            if before != after:
                return Conflict([axis for axis in self.sizes if axis in axes], before, after)
        return None

    def _axes(self, spec: Spec, excluded: Any) -> list[str]:
        """Returns the axes that split dims outside `excluded`, followed by unused axes."""
        used = {axis for entry in spec for axis in entry}
        axes = [axis for dim, entry in enumerate(spec) if dim not in excluded for axis in entry]
        return axes + [axis for axis in self.sizes if axis not in used]


def products_at_risk(module: Any, sizes: Mapping[str, int]) -> dict[int, list[Product]]:
    """Returns the matmuls whose results XLA may permute, keyed by index among all matmuls.

    Shardy copies a function for each of its calls, so a matmul may have several copies.

    Args:
      module: The MLIR module, which is not changed.
      sizes: Sizes of the mesh axes with more than one device.

    Raises:
      ir.MLIRError: Shardy rejects the module.
      ValueError: Shardy rejects the module.
    """
    # Number the matmuls in a clone, propagate shardings in the clone, and group the copies of each
    # matmul by its number.
    clone = module.operation.clone()
    for number, op in enumerate(ops(clone, PRODUCT)):
        op.attributes[_NUMBER] = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), number)
    passmanager.PassManager.parse("builtin.module(sdy-propagation-pipeline)").run(clone)
    calls = {
        ir.FlatSymbolRefAttr(call.attributes["callee"]).value: call
        for call in ops(clone, "func.call")
    }
    copies: dict[int, list[Product]] = {}
    for op in ops(clone, PRODUCT):
        number = ir.IntegerAttr(op.attributes[_NUMBER]).value
        copies.setdefault(number, []).append(Product(op, sizes, calls))
    return {
        number: group
        for number, group in copies.items()
        if any(product.conflict(product.result.spec) for product in group)
    }


def ops(op: Any, name: str) -> Iterator[Any]:
    """Yields the operations with a given name in the regions of an operation, recursively."""
    for block in itertools.chain.from_iterable(op.regions):
        for inner in block:
            if inner.operation.name == name:
                yield inner.operation
            yield from ops(inner.operation, name)


def _subsets(dims: list[int]) -> Iterator[tuple[int, ...]]:
    """Yields each nonempty subset of the contracted dims, because XLA may group by any of them."""
    for count in range(len(dims), 0, -1):
        yield from itertools.combinations(dims, count)


def _sharding(value: Any) -> Any:
    """Returns the sharding of a value after propagation, or None if it is replicated."""
    # The sharding of a block's argument is an attribute of the operation that contains the block.
    # The sharding of any other value is an attribute of the operation that computes it.
    if isinstance(value.owner, ir.Block):
        number, op = ir.BlockArgument(value).arg_number, value.owner.owner.operation
        name = {"sdy.manual_computation": "in_shardings"}.get(op.name, "sdy.sharding")
        if op.name == "func.func":
            if "arg_attrs" not in op.attributes:
                return None
            attributes = ir.DictAttr(ir.ArrayAttr(op.attributes["arg_attrs"])[number])
            return sdy.TensorShardingAttr(attributes[name]) if name in attributes else None
    else:
        number, op = ir.OpResult(value).result_number, value.owner
        name = {"sdy.manual_computation": "out_shardings"}.get(op.name, "sdy.sharding")
        if "sharding" in op.attributes:  # A sharding constraint.
            return sdy.TensorShardingAttr(op.attributes["sharding"])
    if name not in op.attributes:
        return None
    per_value = sdy.TensorShardingPerValueAttr(op.attributes[name])
    return sdy.TensorShardingAttr(per_value.shardings[number])


def _manual_axes(op: Any, calls: Mapping[str, Any]) -> set[str]:
    axes: set[str] = set()
    while (op := op.parent) is not None:
        if op.name == "func.func":
            op = calls.get(ir.StringAttr(op.attributes["sym_name"]).value, op)
        if op.name == "sdy.manual_computation":
            # The type stub lacks `__iter__`.
            axes.update(sdy.ManualAxesAttr(op.attributes["manual_axes"]))  # type: ignore[arg-type]
    return axes


def axes_text(axes: list[str]) -> str:
    """Returns the quoted names of axes, separated by commas."""
    return ", ".join(f"'{axis}'" for axis in axes)
