"""Moves casts from bfloat16 to float32 out of scans, so that stacked outputs stay in bfloat16.

If a layer computes in bfloat16, the gradient of its float32 weight is a bfloat16 product, which is
cast to float32 at the end of the layer's backward pass. A scan over layers would stack the
gradients after this cast, which takes twice the memory. This transformation moves the cast to after
the scan. The results are the same, except that XLA may keep more precision if it fuses a rounding
with the cast back.
"""

from collections.abc import Collection
from typing import Any

from jax.extend import core
from jax.extend.core import primitives

from praxis_lite.core.jaxprs import (
    array_type,
    expand_high_level,
    is_widening_cast,
    open_jaxpr,
    rewrite_jaxpr,
)

__all__ = ("narrow_scans",)


def narrow_scans(jaxpr: Any) -> Any:
    """Moves casts of stacked outputs from the bodies of scans to after the scans."""
    return rewrite_jaxpr(jaxpr, _narrow_scan)


def _narrow_scan(eqn: core.JaxprEqn) -> list[core.JaxprEqn]:
    if eqn.primitive is not primitives.scan_p:
        return [eqn]
    pairs = zip(open_jaxpr(eqn.params["jaxpr"]).outvars, eqn.outvars, strict=True)
    # Stacked outputs have one more dim than in the body, but carried values do not.
    stacked = [i for i, (a, b) in enumerate(pairs) if array_type(b).ndim > array_type(a).ndim]
    return _with_narrow_outputs(eqn, stacked) or [eqn]


def _with_narrow_outputs(
    eqn: core.JaxprEqn, indices: Collection[int]
) -> list[core.JaxprEqn] | None:
    """Returns `eqn` with narrow outputs, followed by their casts, or None if there are no casts.

    Args:
      eqn: An equation with an inner jaxpr.
      indices: Indices of the outputs to consider.
    """
    closed = eqn.params["jaxpr"]
    body, narrow = _narrow_outputs(open_jaxpr(closed), indices)
    if not narrow:
        return None
    # Give the equation new variables for its narrow outputs, and compute the old variables from
    # them by casts. Later equations, which read the old variables, stay the same.
    outvars, casts = list(eqn.outvars), []
    for index in narrow:
        old = outvars[index]
        dtype = array_type(body.outvars[index]).dtype
        outvars[index] = core.Var(array_type(old).update(dtype=dtype))
        casts.append(_cast(outvars[index], old, eqn))
    is_closed = isinstance(closed, core.ClosedJaxpr)
    params = eqn.params | {"jaxpr": closed.replace(jaxpr=body) if is_closed else body}
    return [eqn.replace(outvars=outvars, params=params), *casts]


def _narrow_outputs(jaxpr: core.Jaxpr, indices: Collection[int]) -> tuple[core.Jaxpr, list[int]]:
    """Removes the casts of outputs from a jaxpr; also returns the indices of these outputs.

    If an output comes from a call (a jit or a remat), casts are also removed inside the call.
    """
    eqns = list(map(expand_high_level, jaxpr.eqns))
    producers = {var: eqn for eqn in eqns for var in eqn.outvars}
    outvars, narrow = list(jaxpr.outvars), list[int]()
    # Maps a call's id to (call, {index in `outvars`: position in the call's outputs}).
    by_call: dict[int, tuple[core.JaxprEqn, dict[int, int]]] = {}
    for index in indices:
        var = outvars[index]
        if isinstance(var, core.Literal) or (eqn := producers.get(var)) is None:
            continue
        # If a cast produces the output, return its operand instead. If a call does, its body is
        # changed below.
        if is_widening_cast(eqn) and not isinstance(eqn.invars[0], core.Literal):
            outvars[index] = eqn.invars[0]
            narrow.append(index)
        elif eqn.primitive in (primitives.remat_p, primitives.jit_p):
            by_call.setdefault(id(eqn), (eqn, {}))[1][index] = eqn.outvars.index(var)
    for eqn, positions in by_call.values():
        new = _with_narrow_outputs(eqn, sorted(set(positions.values())))
        if new is None:
            continue
        # Replacing an earlier call may have moved this one.
        start = next(i for i, other in enumerate(eqns) if other is eqn)
        eqns[start : start + 1] = new
        for index, position in positions.items():
            var = new[0].outvars[position]
            if var is not outvars[index]:
                outvars[index] = var
                narrow.append(index)
    return jaxpr.replace(eqns=eqns, outvars=outvars), sorted(narrow)


def _cast(narrow: core.Var, wide: core.Var, like: core.JaxprEqn) -> core.JaxprEqn:
    params = {"new_dtype": array_type(wide).dtype, "weak_type": False, "sharding": None}
    return core.new_jaxpr_eqn(
        [narrow],
        [wide],
        primitives.convert_element_type_p,
        params,
        set(),
        like.source_info,
        like.ctx,
    )
