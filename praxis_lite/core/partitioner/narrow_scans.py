"""Loops that keep what they computed in bfloat16 in bfloat16.

The gradient of a float32 weight that a layer computes with in bfloat16 is a bfloat16 product, cast
to float32 as the last thing that the layer's backward pass does. A scan over layers would keep the
gradients of all layers after the cast, in twice the memory. Here the cast comes after the scan: the
same numbers, but for digits that XLA may keep where a rounding is followed by a cast back.
"""

from collections.abc import Collection
from typing import Any

import jax.numpy as jnp
from jax.extend import core
from jax.extend.core import primitives


def narrow_scans(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """Returns a program whose scans cast what they stack after the loop rather than in it."""
    eqns: list[core.JaxprEqn] = []
    for eqn in jaxpr.eqns:
        params = {name: _of_param(value) for name, value in eqn.params.items()}
        if any(params[name] is not value for name, value in eqn.params.items()):
            eqn = eqn.replace(params=params)
        new = None
        if eqn.primitive is primitives.scan_p:
            body = _opened(eqn.params["jaxpr"])
            pairs = zip(body.outvars, eqn.outvars, strict=True)  # What is carried has no more dims.
            stacked = [i for i, (a, b) in enumerate(pairs) if b.aval.ndim > a.aval.ndim]
            new = _with_narrow_outputs(eqn, stacked)
        eqns += new or [eqn]
    is_same = len(eqns) == len(jaxpr.eqns) and all(map(lambda a, b: a is b, eqns, jaxpr.eqns))
    return jaxpr if is_same else jaxpr.replace(eqns=eqns)


def _of_param(value: Any) -> Any:
    if isinstance(value, core.ClosedJaxpr):
        jaxpr = narrow_scans(value.jaxpr)
        return value if jaxpr is value.jaxpr else value.replace(jaxpr=jaxpr)
    if isinstance(value, core.Jaxpr):
        return narrow_scans(value)
    if isinstance(value, tuple):  # The branches of a condition.
        new = tuple(map(_of_param, value))
        return value if all(map(lambda a, b: a is b, new, value)) else new
    return value


def _opened(jaxpr: Any) -> core.Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr


def _with_narrow_outputs(eqn: core.JaxprEqn, indices: Collection[int]) -> list | None:
    """Returns an equation that calls a program, those outputs narrow, and the casts behind it.

    None if it casts none of them.
    """
    closed = eqn.params["jaxpr"]
    body, narrow = _narrow_outputs(_opened(closed), indices)
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


def _narrow_outputs(
    jaxpr: core.Jaxpr, indices: Collection[int]
) -> tuple[core.Jaxpr, list[int]]:
    """Returns a program that leaves out the casts of some outputs, and the indices of these."""
    made_by = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    outvars, narrow, of_call = list(jaxpr.outvars), [], {}
    for index in indices:
        var = outvars[index]
        eqn = None if isinstance(var, core.Literal) else made_by.get(var)
        if eqn is None:
            continue
        if _widens(eqn):
            outvars[index] = eqn.invars[0]
            narrow.append(index)
        elif eqn.primitive in (primitives.remat_p, primitives.jit_p):
            of_call.setdefault(id(eqn), (eqn, []))[1].append(index)
    eqns = list(jaxpr.eqns)
    for eqn, found in of_call.values():
        places = {index: eqn.outvars.index(outvars[index]) for index in found}
        new = _with_narrow_outputs(eqn, sorted(set(places.values())))
        if new is None:
            continue
        at = next(i for i, one in enumerate(eqns) if one is eqn)
        eqns[at : at + 1] = new
        for index, place in places.items():
            var = new[0].outvars[place]
            if var is not outvars[index]:
                outvars[index] = var
                narrow.append(index)
    return jaxpr.replace(eqns=eqns, outvars=outvars), sorted(narrow)


def _widens(eqn: core.JaxprEqn) -> bool:
    """Returns True if an equation casts floats to a type that holds all of them."""
    if eqn.primitive is not primitives.convert_element_type_p:
        return False
    old, new = eqn.invars[0].aval.dtype, eqn.params["new_dtype"]
    are_floats = jnp.issubdtype(old, jnp.floating) and jnp.issubdtype(new, jnp.floating)
    is_literal = isinstance(eqn.invars[0], core.Literal)
    return are_floats and not is_literal and old != new and jnp.promote_types(old, new) == new


def _cast(narrow: core.Var, wide: core.Var, like: core.JaxprEqn) -> core.JaxprEqn:
    params = {"new_dtype": wide.aval.dtype, "weak_type": False, "sharding": None}
    return core.new_jaxpr_eqn(
        [narrow], [wide], primitives.convert_element_type_p, params, set(), like.source_info,
        like.ctx,
    )
