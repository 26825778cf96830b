"""Mesh axes over which a `jax.vmap` is split, which a `jax.shard_map` in it has to take by hand.

It then has its part of the mapped dim on each device. Without that, all devices gather all of it,
and each computes all.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

_MAPPED: contextvars.ContextVar[frozenset[str]] = contextvars.ContextVar(
    "mapped", default=frozenset()
)
_IS_BEFORE: contextvars.ContextVar[bool] = contextvars.ContextVar("is_before", default=False)


def vmapped_axes() -> frozenset[str]:
    """Returns the axes of the `vmap_over` that is traced, or that is to come."""
    return _MAPPED.get()


def axes_by_hand(axes: Iterable[str]) -> set[str]:
    """Returns the axes that a `jax.shard_map` has to take to take these.

    In a `vmap_over` all: it splits constraints over the others by its own axes, too, which the
    `jax.shard_map` takes.
    """
    if _IS_BEFORE.get() or not _MAPPED.get():
        return set(axes)
    mesh = jax.sharding.get_abstract_mesh()
    return set(mesh.axis_names) - set(mesh.manual_axes)


def vmap_over(
    axes: Iterable[str], function: Callable[..., Any], **settings: Any
) -> Callable[..., Any]:
    """Returns `jax.vmap(function, **settings)` whose mapped dim is split over mesh axes."""
    axes = tuple(axes)
    if not axes:
        return jax.vmap(function, **settings)

    def within(*args: Any) -> Any:
        with _in_force(_MAPPED, _MAPPED.get() | set(axes)):
            return function(*args)

    return jax.vmap(within, spmd_axis_name=axes, **settings)


@contextlib.contextmanager
def before_vmap(axes: Iterable[str]) -> Iterator[None]:
    """Returns a context in which gradients are traced that a `vmap_over` maps later.

    JAX's gradient of a `jax.shard_map` sums over the axes that split nothing in it, which would be
    those of the vmap: it has to have a gradient of its own.
    """
    with _in_force(_IS_BEFORE, True), _in_force(_MAPPED, _MAPPED.get() | set(axes)):
        yield


def is_before_vmap() -> bool:
    """Returns True in `before_vmap`."""
    return _IS_BEFORE.get()


@contextlib.contextmanager
def _in_force(variable: contextvars.ContextVar, value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
