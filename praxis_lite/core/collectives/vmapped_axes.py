"""Tracks the mesh axes that split the mapped dim of a `jax.vmap`.

A `jax.shard_map` inside the vmap must also make these axes manual, so that each device computes
only its shard of the mapped dim. Otherwise every device gathers and computes the complete dim.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import jax

_T = TypeVar("_T")

_MAPPED: contextvars.ContextVar[frozenset[str]] = contextvars.ContextVar(
    "mapped", default=frozenset()
)
_IS_BEFORE: contextvars.ContextVar[bool] = contextvars.ContextVar("is_before", default=False)


def vmapped_axes() -> frozenset[str]:
    """Returns the axes of the enclosing `vmap_over` calls and `before_vmap` contexts."""
    return _MAPPED.get()


def manual_axes_for(axes: Iterable[str]) -> set[str]:
    """Returns the manual axes for a `jax.shard_map` over `axes`, inside or outside a `vmap_over`.

    Inside a `vmap_over`, every axis must be manual: the vmap adds its axes to sharding constraints
    over the remaining axes, but constraints must not use manual axes.
    """
    if _IS_BEFORE.get() or not _MAPPED.get():
        return set(axes)
    mesh = jax.sharding.get_abstract_mesh()
    return set(mesh.axis_names) - set(mesh.manual_axes)


def vmap_over(
    axes: Iterable[str], function: Callable[..., Any], **settings: Any
) -> Callable[..., Any]:
    """Returns `jax.vmap(function, **settings)` with its mapped dim split over mesh axes."""
    axes = tuple(axes)
    if not axes:
        return jax.vmap(function, **settings)

    def tracked(*args: Any) -> Any:
        with _set_to(_MAPPED, _MAPPED.get() | set(axes)):
            return function(*args)

    return jax.vmap(tracked, spmd_axis_name=axes, **settings)


@contextlib.contextmanager
def before_vmap(axes: Iterable[str]) -> Iterator[None]:
    """Declares that the gradient of the body's code will run inside `vmap_over(axes, ...)`.

    JAX's gradient of a `jax.shard_map` sums over every manual axis that does not split its inputs.
    That would include the axes of the vmap, so such a `jax.shard_map` needs a custom gradient.
    """
    with _set_to(_IS_BEFORE, True), _set_to(_MAPPED, _MAPPED.get() | set(axes)):
        yield


def is_before_vmap() -> bool:
    """Returns whether code is being traced in the body of `before_vmap`."""
    return _IS_BEFORE.get()


@contextlib.contextmanager
def _set_to(variable: contextvars.ContextVar[_T], value: _T) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
