"""Checkpoint names, by which remat policies select whether and where activations are saved."""

import contextlib
from collections.abc import Iterator, Set
from contextvars import ContextVar
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint

from praxis_lite.core.sharding.mesh import compiled_platform

PyTree = Any
_OFFLOADED: ContextVar[Set[str]] = ContextVar("offloaded activations", default=frozenset())


@contextlib.contextmanager
def offloaded(names: Set[str]) -> Iterator[None]:
    """Offloads activations with these names to host memory inside the `with` block."""
    token = _OFFLOADED.set(_OFFLOADED.get() | names)
    try:
        yield
    finally:
        _OFFLOADED.reset(token)


def is_offloaded(name: str) -> bool:
    """Returns whether the current policy offloads activations with this name to host memory."""
    return name in _OFFLOADED.get()


def named(x: PyTree, name: str) -> PyTree:
    """Names activations for checkpoint policies (`jax.ad_checkpoint.checkpoint_name`).

    On TPU, offloaded arrays get a fixed memory layout. Otherwise XLA (libtpu 0.0.51) may choose
    different layouts in the forward and backward passes, and then copy the stacked activations of
    all layers to the device and back.
    """
    if not is_offloaded(name) or compiled_platform() != "tpu":
        return checkpoint_name(x, name)
    return _in_row_major_order(checkpoint_name(_in_row_major_order(x), name))


def name_residuals(x: PyTree, name: str | None) -> PyTree:
    """Names a kernel's residuals for checkpoint policies, or returns them unchanged for None."""
    return x if name is None else checkpoint_name(x, name)


def _in_row_major_order(x: PyTree) -> PyTree:
    return jax.tree.map(lambda a: with_layout_constraint(a, Layout(tuple(range(a.ndim)))), x)
