"""Works around an XLA bug that permutes the results of some matmuls on 3-axis meshes.

For each matmul that `product_orders` finds, sharding constraints pin its operands and results to
the shardings from Shardy's propagation. XLA then computes the results in the device order of the
operands and moves them afterwards. All other shardings stay the same.
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

from praxis_lite.core.errors import format_bytes, shortened, warn_once
from praxis_lite.core.xla_workarounds.product_orders import (
    PRODUCT,
    Product,
    Spec,
    Split,
    axes_text,
    ops,
    products_at_risk,
)

__all__ = ("PatchedFunction", "patch_matmuls", "patch_exported_matmuls")

_COMPARE = "compare the job with a single device (`praxis check`)"
_NOT_PATCHED = f"It could not be patched. Before you rely on its results, {_COMPARE}"
_NOT_SEARCHED = "The program was not searched for matmuls that XLA may permute on 3-axis meshes"
# Each round's constraints may change the shardings of other matmuls, which are patched in the next
# round.
_MAX_ROUNDS = 4


def patch_matmuls(
    lowered: jax.stages.Lowered, mesh: Mesh, report: Callable[[str], None] = warn_once
) -> jax.stages.Lowered:
    """Patches a lowered function in place, so that XLA does not permute results of matmuls.

    JAX caches the lowered function, so later compilations and calls use the patched version.

    Args:
      lowered: A lowered function that has not been compiled or called yet.
      mesh: Mesh of the function's arrays.
      report: Called with a message per patched matmul, or with the reason why the function cannot
        be searched, for example because it uses GSPMD.

    Returns:
      `lowered`.
    """
    if len(_sizes(mesh)) > 2:
        _patch_module(lowered.compiler_ir(), mesh, report)
    return lowered


def patch_exported_matmuls(
    exported: jax.export.Exported, mesh: Mesh, report: Callable[[str], None] = warn_once
) -> jax.export.Exported:
    """Returns an exported function with the patches that `patch_matmuls` applies.

    Functions with a symbolic batch size cannot be patched, because Shardy rejects them.
    """
    if len(_sizes(mesh)) < 3:
        return exported
    context = ir.Context()
    for dialect in (chlo, sdy, stablehlo):
        dialect.register_dialect(context)
    module = mlir.deserialize_portable_artifact(exported.mlir_module_serialized, context)
    if not _patch_module(module, mesh, report):
        return exported
    # As in jax.export, stay compatible with the jax versions from the last four weeks.
    version = stablehlo.get_version_from_compatibility_requirement(
        stablehlo.StablehloCompatibilityRequirement.WEEK_4
    )
    serialized = mlir.serialize_portable_artifact(module, version, True)
    return dataclasses.replace(exported, mlir_module_serialized=serialized)


class PatchedFunction:
    """A jitted function that is patched by `patch_matmuls` on the first call.

    Args:
      jitted: Result of `jax.jit`. All calls must have the same shapes, so that it is lowered only
        once.
      mesh: Mesh of the function's arguments.
    """

    def __init__(self, jitted: Any, mesh: Mesh):
        self._jitted, self._mesh, self._is_patched = jitted, mesh, False

    def __call__(self, *args: Any) -> Any:
        if not self._is_patched:
            patch_matmuls(self._jitted.trace(*args).lower(), self._mesh)
            self._is_patched = True
        return self._jitted(*args)


def _patch_module(module: Any, mesh: Mesh, report: Callable[[str], None]) -> bool:
    """Patches an MLIR module in place; returns whether XLA could permute results of any matmul."""
    # JAX adds attributes for its settings at run time.
    if not jax.config.jax_use_shardy_partitioner:  # type: ignore[attr-defined]
        report(
            f"{_NOT_SEARCHED}: jax_use_shardy_partitioner is False. Set it to True, or {_COMPARE}."
        )
        return False
    sentences: dict[int, str] = {}
    with module.context, ir.Location.unknown():
        try:
            for num_rounds in range(_MAX_ROUNDS + 1):
                at_risk = products_at_risk(module, _sizes(mesh))
                if not at_risk:
                    break
                products = list(ops(module.operation, PRODUCT))
                for number, copies in at_risk.items():
                    is_last = num_rounds == _MAX_ROUNDS
                    outcome = _NOT_PATCHED if is_last else _patch(products[number], copies)
                    sentences[number] = _sentence(copies, outcome)
        except (ir.MLIRError, ValueError) as error:
            reason = shortened(str(error), 300)
            report(f"{_NOT_SEARCHED}: Shardy reports {reason} You can {_COMPARE}.")
    for sentence in dict.fromkeys(sentences.values()):
        report(sentence)
    return bool(sentences)


def _sizes(mesh: Mesh) -> dict[str, int]:
    return {axis: size for axis, size in mesh.shape.items() if size > 1}


def _patch(op: Any, copies: Sequence[Product]) -> str:
    """Adds constraints around a matmul that XLA may permute; returns a description of the change.

    Args:
      op: The matmul, in the module that will be compiled.
      copies: The matmul in each call of its function, after propagation.
    """
    result, product = op.results[0], copies[0]
    with ir.InsertionPoint.after(op):
        if any(copy.shardings != product.shardings for copy in copies):
            # No constraint fits all calls. The barrier keeps users of the results from deciding how
            # the matmul shards them.
            barrier = sdy.PropagationBarrierOp(result, sdy.PropagationDirection.FORWARD)
            result.replace_all_uses_except(barrier.result, barrier.operation)
            return (
                "Its results are now first sharded like its operands, because its function is "
                "called with different shardings; they may be replicated over more devices"
            )
        # First constrain the results to the order in which XLA computes them, then to the shardings
        # that their users expect.
        spec, dropped = _in_one_order(product)
        constraint = sdy.ShardingConstraintOp(result, _closed(product, product.result, spec))
        result.replace_all_uses_except(constraint.result, constraint.operation)
        final = sdy.ShardingConstraintOp(constraint.result, _closed(product, product.result))
        constraint.result.replace_all_uses_except(final.result, final.operation)
    with ir.InsertionPoint(op):
        # The operands keep the shardings from propagation.
        for number, split in enumerate((product.lhs, product.rhs)):
            constraint = sdy.ShardingConstraintOp(op.operands[number], _closed(product, split))
            op.operands[number] = constraint.result
    size = format_bytes(int(product.result.bits // 8))
    if not dropped:
        return (
            "Its results are now computed in the operand's order and moved: "
            f"{size} more from each device"
        )
    num_copies = math.prod(product.sizes[axis] for axis in dropped)
    return (
        f"Its results are now first replicated over {axes_text(dropped)}: {num_copies} times "
        f"{size} on each device"
    )


def _in_one_order(product: Product) -> tuple[Spec, list[str]]:
    """Returns a spec for the results in the operand's axis order, and the axes that it drops."""
    # First try to reorder the axes within each dim, which costs only a collective-permute. If no
    # such order avoids the conflict, replicate the results over the contracted axes.
    spec, dropped = product.result.spec, list[str]()
    conflict = product.conflict(spec)
    assert conflict is not None, "The product is at risk."
    moved = [tuple(sorted(entry, key=[*conflict.summed, *conflict.before].index)) for entry in spec]
    if product.conflict(moved) is None:
        return moved, dropped
    while (conflict := product.conflict(spec)) is not None:
        dropped += conflict.summed
        spec = [tuple(axis for axis in entry if axis not in conflict.summed) for entry in spec]
    return spec, dropped


def _closed(product: Product, split: Split, spec: Spec | None = None) -> Any:
    """Returns a sharding that propagation does not change.

    Args:
      product: The matmul.
      split: Sharding of one of the matmul's arrays.
      spec: Mesh axes per dim that replace the axes of `split`. They must be a permutation or a
        subset of the axes of `split`.
    """
    if split.sharding is None:
        dims: list[list[Any]] = [[]] * len(split.spec)
        unreduced = []
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


def _sentence(copies: Sequence[Product], outcome: str) -> str:
    risk = next(filter(None, (product.conflict(product.result.spec) for product in copies)))
    summed = axes_text(risk.summed)
    return (
        f"XLA may permute the results of the matmul {copies[0].name}: it sums over {summed}, which "
        f"also splits the results, and the other axes are in the order {axes_text(risk.before)} in "
        f"an operand and {axes_text(risk.after)} in the results (docs/upstream/matmul_rows.md). "
        f"{outcome}. To avoid this, split both in the same order, or do not split the results over "
        f"{summed}."
    )
