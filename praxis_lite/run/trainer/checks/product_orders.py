"""Matrix products that XLA's partitioner may permute: found in a program before it is compiled.

On a mesh of three axes XLA gives wrong numbers, without an error, for some products
(docs/upstream/matmul_rows.md). Where an axis that is summed over splits the results, too, it groups
devices by that axis, and numbers the devices of a group by their order in the larger operand and by
their order in the results. Where these differ, parts of the results may change places.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import sdy, stablehlo
from jax.sharding import Mesh

_NOT_READ = "Products that XLA may permute on three axes of a mesh were not looked for"
_COMPARE = "compare the job with one device by --mode=check"
# The mesh axes, of several devices, that split each dim of an array.
Spec = list[tuple[str, ...]]


def product_warnings(lowered: jax.stages.Lowered, mesh: Mesh) -> list[str]:
    """Returns a sentence for each product of a program that XLA may permute.

    JAX's own propagation (Shardy) says how operands and results split; nothing is compiled. Of a
    program that it cannot read, such as one for the former partitioner (GSPMD), a sentence says so.
    """
    sizes = {axis: size for axis, size in mesh.shape.items() if size > 1}
    if len(sizes) < 3:
        return []
    if not jax.config.jax_use_shardy_partitioner:
        return [f"{_NOT_READ}: jax_use_shardy_partitioner is False. Set it to True, or {_COMPARE}."]
    module = lowered.compiler_ir()
    with module.context:
        program = module.operation.clone()
        try:
            passmanager.PassManager.parse("builtin.module(sdy-propagation-pipeline)").run(program)
        except (ir.MLIRError, ValueError) as error:
            return [f"{_NOT_READ}: Shardy says {error}. You can {_COMPARE}."]
        calls = {_callee(op): op for op in _ops(program, "func.call")}
        products = _ops(program, "stablehlo.dot_general")
        warnings = (_warning(op, sizes, calls) for op in products)
        return list(dict.fromkeys(filter(None, warnings)))


def _ops(op: Any, name: str) -> Iterator[Any]:
    """Yields the operations of a name in an operation's regions."""
    for block in itertools.chain.from_iterable(op.regions):
        for inner in block:
            if inner.operation.name == name:
                yield inner.operation
            yield from _ops(inner.operation, name)


def _warning(op: Any, sizes: Mapping[str, int], calls: Mapping[str, Any]) -> str | None:
    """Returns the sentence of a product; None: XLA numbers its devices in one order.

    Args:
      sizes: of the mesh axes.
      calls: one of each function, by its name.
    """
    dims = stablehlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
    manual_axes = _manual_axes(op)
    sizes = {axis: size for axis, size in sizes.items() if axis not in manual_axes}
    result, lhs, rhs = (_Split(x, sizes, calls) for x in (op.results[0], *op.operands))
    whole = math.prod(size for axis, size in sizes.items() if axis not in result.used)
    # XLA lays out the smaller operand as the larger one.
    operand, summed = (
        (lhs, dims.lhs_contracting_dimensions) if lhs.bits > rhs.bits
        else (rhs, dims.rhs_contracting_dimensions)
    )
    for some in _parts(list(summed)):
        axes = {axis for dim in some for axis in operand.spec[dim]}
        of_results = [
            dim for dim, entry in enumerate(result.spec) if entry and axes.issuperset(entry)
        ]
        if not axes or axes != {axis for dim in of_results for axis in result.spec[dim]}:
            continue
        if whole > 1 and whole % math.prod(sizes[axis] for axis in axes) == 0:
            continue  # Of results that are whole over as many devices XLA orders these.
        before, after = operand.axes_but(some), result.axes_but(of_results)
        if before != after:
            return _sentence(_name(op), [axis for axis in sizes if axis in axes], before, after)
    return None


def _sentence(name: str, summed: list[str], before: list[str], after: list[str]) -> str:
    return (
        f"XLA may permute the results of a matrix product, {name}: it sums over {_text(summed)}, "
        f"which splits the results, too, and the other axes are in the order {_text(before)} in an "
        f"operand and {_text(after)} in the results (docs/upstream/matmul_rows.md). Most such "
        f"products are right. Before you train it, {_COMPARE}; if its numbers differ, split both "
        "in the same order, or the results not over "
        f"{_text(summed)}."
    )


def _parts(dims: list[int]) -> Iterator[tuple[int, ...]]:
    """Yields each choice of one or more of the dims that are summed: XLA may group by some."""
    for count in range(len(dims), 0, -1):
        yield from itertools.combinations(dims, count)


class _Split:
    """How an array splits.

    Attributes:
      spec: the axes that split each dim.
      used: all of them.
      bits: of a part.
    """

    def __init__(self, value: Any, sizes: Mapping[str, int], calls: Mapping[str, Any]):
        value = ir.Value(value)
        shape = ir.RankedTensorType(value.type)
        sharding = _sharding(value, calls)
        dims = [()] * shape.rank if sharding is None else [
            tuple(sdy.AxisRefAttr(axis).name for axis in sdy.DimensionShardingAttr(dim).axes)
            for dim in sharding.dimension_shardings
        ]
        self.spec: Spec = [tuple(axis for axis in dim if axis in sizes) for dim in dims]
        self.used = {axis for dim in self.spec for axis in dim}
        self._whole = [axis for axis in sizes if axis not in self.used]
        width = int(re.findall(r"\d+", str(shape.element_type))[0])
        self.bits = math.prod(shape.shape) * width / math.prod(sizes[axis] for axis in self.used)

    def axes_but(self, dims: Any) -> list[str]:
        """Returns the axes that do not split `dims`: as the other dims have them, then the rest."""
        left = [axis for dim, entry in enumerate(self.spec) if dim not in dims for axis in entry]
        return left + self._whole


def _sharding(value: Any, calls: Mapping[str, Any]) -> Any:
    """Returns the sharding of a value after propagation, or None if the value is whole.

    It does not go into functions, which XLA inlines: an argument splits as in a call.
    """
    if isinstance(value.owner, ir.Block):
        number, op = ir.BlockArgument(value).arg_number, value.owner.owner.operation
        name = {"sdy.manual_computation": "in_shardings"}.get(op.name, "sdy.sharding")
        if op.name == "func.func":
            of_arguments = ir.ArrayAttr(op.attributes["arg_attrs"])[number]
            of_value = ir.DictAttr(of_arguments)
            if name in of_value:
                return sdy.TensorShardingAttr(of_value[name])
            call = calls.get(ir.StringAttr(op.attributes["sym_name"]).value)
            return call and _sharding(ir.Value(call.operands[number]), calls)
    else:
        number, op = ir.OpResult(value).result_number, value.owner
        name = {"sdy.manual_computation": "out_shardings"}.get(op.name, "sdy.sharding")
        if "sharding" in op.attributes:  # It states one.
            return sdy.TensorShardingAttr(op.attributes["sharding"])
    if name not in op.attributes:
        return None
    of_values = sdy.TensorShardingPerValueAttr(op.attributes[name])
    return sdy.TensorShardingAttr(of_values.shardings[number])


def _callee(call: Any) -> str:
    return ir.FlatSymbolRefAttr(call.attributes["callee"]).value


def _manual_axes(op: Any) -> set[str]:
    axes: set[str] = set()
    while (op := op.parent) is not None:
        if op.name == "sdy.manual_computation":
            axes.update(sdy.ManualAxesAttr(op.attributes["manual_axes"]))
    return axes


def _name(op: Any) -> str:
    """Returns the name scopes of a product."""
    names = re.search(r'"([^"]*)"', str(op.location))
    return names[1] if names else "without a name"


def _text(axes: list[str]) -> str:
    return ", ".join(f"'{axis}'" for axis in axes)
