"""Works around an XLA bug that permutes results of some matmuls on 3-axis meshes.

For each product found by `product_orders`, constraints fix the splits of operands and results to
those of Shardy's propagation, and make XLA first compute results in the operands' order of devices
and then move them. Other splits in the program do not change.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export
from jax.extend import mlir
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import chlo, sdy, stablehlo
from jax.sharding import Mesh

from praxis_lite.core.errors import format_bytes, shown, warn_once
from praxis_lite.core.xla_workarounds.product_orders import (
    PRODUCT,
    Product,
    Spec,
    Split,
    axes_text,
    ops,
    products_at_risk,
)

__all__ = ("MendedFunction", "mended", "mended_export")

_COMPARE = "compare the job with one device by --mode=check"
_NOT_MENDED = f"It could not be mended: before you rely on it, {_COMPARE}"
_NOT_READ = "Products that XLA may permute on three axes of a mesh were not looked for"
# Later rounds fix products whose splits changed by the constraints of earlier ones.
_MOST_ROUNDS = 4


def mended(
    lowered: jax.stages.Lowered, mesh: Mesh, say: Callable[[str], None] = warn_once
) -> jax.stages.Lowered:
    """Edits a program in place so that XLA permutes none of its products, and returns it.

    JAX caches the program: later calls of the same function compile the edited one.

    Args:
      lowered: not compiled or called yet.
      mesh: of its arrays.
      say: called with a sentence for each fixed product; or with the reason why a program cannot be
        read, such as one for GSPMD.
    """
    if len(_sizes(mesh)) > 2:
        _mend_module(lowered.compiler_ir(), mesh, say)
    return lowered


def mended_export(
    exported: jax.export.Exported, mesh: Mesh, say: Callable[[str], None] = warn_once
) -> jax.export.Exported:
    """Returns an exported program, edited as by `mended`.

    Shardy cannot read programs with a symbolic number of rows.
    """
    if len(_sizes(mesh)) < 3:
        return exported
    context = ir.Context()
    for dialect in (chlo, sdy, stablehlo):
        dialect.register_dialect(context)
    module = mlir.deserialize_portable_artifact(exported.mlir_module_serialized, context)
    if not _mend_module(module, mesh, say):
        return exported
    # As in jax.export: readable by jax versions of the last weeks.
    version = stablehlo.get_version_from_compatibility_requirement(
        stablehlo.StablehloCompatibilityRequirement.WEEK_4
    )
    serialized = mlir.serialize_portable_artifact(module, version, True)
    return dataclasses.replace(exported, mlir_module_serialized=serialized)


class MendedFunction:
    """A function of `jax.jit`, edited by `mended` on its first call.

    Args:
      jitted: always called with the same shapes, so that it has one program.
      mesh: of its arguments.
    """

    def __init__(self, jitted: Any, mesh: Mesh):
        self._jitted, self._mesh, self._is_mended = jitted, mesh, False

    def __call__(self, *args: Any) -> Any:
        if not self._is_mended:
            mended(self._jitted.trace(*args).lower(), self._mesh)
            self._is_mended = True
        return self._jitted(*args)


def _mend_module(module: Any, mesh: Mesh, say: Callable[[str], None]) -> bool:
    """Edits a program; returns True if it had such products. Arguments are as of `mended`."""
    if not jax.config.jax_use_shardy_partitioner:
        say(f"{_NOT_READ}: jax_use_shardy_partitioner is False. Set it to True, or {_COMPARE}.")
        return False
    sentences: dict[int, str] = {}
    with module.context, ir.Location.unknown():
        try:
            for num_rounds in range(_MOST_ROUNDS + 1):
                at_risk = products_at_risk(module, _sizes(mesh))
                if not at_risk:
                    break
                products = list(ops(module.operation, PRODUCT))
                for number, copies in at_risk.items():
                    is_last = num_rounds == _MOST_ROUNDS
                    result = _NOT_MENDED if is_last else _mend(products[number], copies)
                    sentences[number] = _sentence(copies, result)
        except (ir.MLIRError, ValueError) as error:
            say(f"{_NOT_READ}: Shardy says {shown(str(error), 300)} You can {_COMPARE}.")
    for sentence in dict.fromkeys(sentences.values()):
        say(sentence)
    return bool(sentences)


def _sizes(mesh: Mesh) -> dict[str, int]:
    return {axis: size for axis, size in mesh.shape.items() if size > 1}


def _mend(op: Any, copies: Sequence[Product]) -> str:
    """Edits a product that XLA may permute; returns what becomes of its results.

    Args:
      op: of the program that will be compiled.
      copies: it in each call of its function, after propagation.
    """
    result, product = op.results[0], copies[0]
    with ir.InsertionPoint.after(op):
        if any(copy.shardings != product.shardings for copy in copies):
            free = sdy.PropagationBarrierOp(result, sdy.PropagationDirection.FORWARD)
            result.replace_all_uses_except(free.result, free.operation)
            return (
                "Here they first split as the operands do, for its function is called with several "
                "splits: then they may be whole over more devices"
            )
        spec, dropped = _in_one_order(product)
        first = sdy.ShardingConstraintOp(result, _held(product, product.result, spec))
        result.replace_all_uses_except(first.result, first.operation)
        then = sdy.ShardingConstraintOp(first.result, _held(product, product.result))
        first.result.replace_all_uses_except(then.result, then.operation)
    with ir.InsertionPoint(op):
        for number, split in enumerate((product.lhs, product.rhs)):
            held = sdy.ShardingConstraintOp(op.operands[number], _held(product, split))
            op.operands[number] = held.result
    size = format_bytes(int(product.result.bits // 8))
    if not dropped:
        return f"Here they are made in the operand's order and moved: {size} more from each device"
    whole = math.prod(product.sizes[axis] for axis in dropped)
    return (
        f"Here they are first whole over {axes_text(dropped)}: {whole} times {size} on each device"
    )


def _in_one_order(product: Product) -> tuple[Spec, list[str]]:
    """Returns how the results split in the operand's order, and the axes left out for that."""
    spec, dropped = product.result.spec, []
    conflict = product.conflict(spec)
    moved = [tuple(sorted(entry, key=[*conflict.summed, *conflict.before].index)) for entry in spec]
    if product.conflict(moved) is None:
        return moved, dropped
    while (conflict := product.conflict(spec)) is not None:
        dropped += conflict.summed
        spec = [tuple(axis for axis in entry if axis not in conflict.summed) for entry in spec]
    return spec, dropped


def _held(product: Product, split: Split, spec: Spec | None = None) -> Any:
    """Returns a sharding that propagation leaves as it is.

    Args:
      split: of an array of the product.
      spec: the axes that split it instead, of the same dims or none.
    """
    if split.sharding is None:
        dims, unreduced = [[]] * len(split.spec), []
    else:
        dims = [sdy.DimensionShardingAttr(x).axes for x in split.sharding.dimension_shardings]
        unreduced = split.sharding.unreduced_axes
    if spec is not None:
        refs = {sdy.AxisRefAttr(ref).name: ref for dim in dims for ref in dim}
        dims = [[refs[axis] for axis in entry] for entry in spec]
    return sdy.TensorShardingAttr.get(
        product.result.sharding.mesh_or_ref,
        [sdy.DimensionShardingAttr.get(dim, is_closed=True) for dim in dims],
        unreduced_axes=unreduced,
    )


def _sentence(copies: Sequence[Product], result: str) -> str:
    risk = next(filter(None, (product.conflict(product.result.spec) for product in copies)))
    summed = axes_text(risk.summed)
    return (
        f"XLA may permute the results of a matrix product, {copies[0].name}: it sums over "
        f"{summed}, which splits the results, too, and the other axes are in the order "
        f"{axes_text(risk.before)} in an operand and {axes_text(risk.after)} in the results "
        f"(docs/upstream/matmul_rows.md). {result}. This would not be if you split both in the "
        f"same order, or the results not over {summed}."
    )
