"""Loops that keep what they computed in bfloat16 in bfloat16.

The gradient of a float32 weight that a layer computes with in bfloat16 is a bfloat16 product, cast
to float32 as the last thing that the layer's backward pass does. A scan over layers would keep the
gradients of all layers after the cast, in twice the memory. Here the cast comes after the scan: the
same numbers, but for digits that XLA may keep where a rounding is followed by a cast back.
"""

from collections.abc import Collection
from typing import Any

from jax.extend import core
from jax.extend.core import primitives

from praxis_lite.core.jaxprs import expand_high_level, is_widening_cast, open_jaxpr, rewrite_jaxpr

__all__ = ("narrow_scans",)


def narrow_scans(jaxpr: Any) -> Any:
    """Returns a program whose scans cast what they stack after the loop rather than in it."""
    return rewrite_jaxpr(jaxpr, _narrow_scan)


def _narrow_scan(eqn: core.JaxprEqn) -> list[core.JaxprEqn]:
    if eqn.primitive is not primitives.scan_p:
        return [eqn]
    pairs = zip(open_jaxpr(eqn.params["jaxpr"]).outvars, eqn.outvars, strict=True)
    # What is carried has no more dims.
    stacked = [i for i, (a, b) in enumerate(pairs) if b.aval.ndim > a.aval.ndim]
    return _with_narrow_outputs(eqn, stacked) or [eqn]


def _with_narrow_outputs(eqn: core.JaxprEqn, indices: Collection[int]) -> list | None:
    """Returns an equation that calls a program, those outputs narrow, and the casts behind it.

    None if it casts none of them.
    """
    closed = eqn.params["jaxpr"]
    body, narrow = _narrow_outputs(open_jaxpr(closed), indices)
    if not narrow:
        return None
    outvars, casts = list(eqn.outvars), []
    for index in narrow:
        old = outvars[index]
        outvars[index] = core.Var(old.aval.update(dtype=body.outvars[index].aval.dtype))
        casts.append(_cast(outvars[index], old, eqn))
    is_closed = isinstance(closed, core.ClosedJaxpr)
    params = eqn.params | {"jaxpr": closed.replace(jaxpr=body) if is_closed else body}
    return [eqn.replace(outvars=outvars, params=params), *casts]


def _narrow_outputs(jaxpr: core.Jaxpr, indices: Collection[int]) -> tuple[core.Jaxpr, list[int]]:
    """Returns a program that leaves out the casts of some outputs, and the indices of these."""
    eqns = list(map(expand_high_level, jaxpr.eqns))
    made_by = {var: eqn for eqn in eqns for var in eqn.outvars}
    outvars, narrow, of_call = list(jaxpr.outvars), [], {}
    for index in indices:
        var = outvars[index]
        eqn = None if isinstance(var, core.Literal) else made_by.get(var)
        if eqn is None:
            continue
        if is_widening_cast(eqn) and not isinstance(eqn.invars[0], core.Literal):
            outvars[index] = eqn.invars[0]
            narrow.append(index)
        elif eqn.primitive in (primitives.remat_p, primitives.jit_p):
            of_call.setdefault(id(eqn), (eqn, []))[1].append(index)
    for eqn, result in of_call.values():
        places = {index: eqn.outvars.index(outvars[index]) for index in result}
        new = _with_narrow_outputs(eqn, sorted(set(places.values())))
        if new is None:
            continue
        at = next(i for i, item in enumerate(eqns) if item is eqn)
        eqns[at : at + 1] = new
        for index, place in places.items():
            var = new[0].outvars[place]
            if var is not outvars[index]:
                outvars[index] = var
                narrow.append(index)
    return jaxpr.replace(eqns=eqns, outvars=outvars), sorted(narrow)


def _cast(narrow: core.Var, wide: core.Var, like: core.JaxprEqn) -> core.JaxprEqn:
    params = {"new_dtype": wide.aval.dtype, "weak_type": False, "sharding": None}
    return core.new_jaxpr_eqn(
        [narrow], [wide], primitives.convert_element_type_p, params, set(), like.source_info,
        like.ctx,
    )
