"""Names of activations, by which a checkpoint policy says where each is kept."""

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
    """Adds to the names of the activations that go to the host's memory, while it is entered."""
    token = _OFFLOADED.set(_OFFLOADED.get() | names)
    try:
        yield
    finally:
        _OFFLOADED.reset(token)


def goes_to_host(name: str) -> bool:
    """Returns True if the policy sends the activations of a name to the host's memory."""
    return name in _OFFLOADED.get()


def named(x: PyTree, name: str) -> PyTree:
    """Returns an array, or several, under a name (`jax.ad_checkpoint.checkpoint_name`).

    What a TPU sends to its host has its dims in memory in their own order. Else XLA may choose one
    order where the forward pass writes, and another where the backward pass reads; it then takes
    the stack of all layers to the device and back in between (libtpu 0.0.51).
    """
    if not goes_to_host(name) or compiled_platform() != "tpu":
        return checkpoint_name(x, name)
    # Once for what is written, and once for what is read.
    return _in_order(checkpoint_name(_in_order(x), name))


def name_residuals(x: PyTree, name: str | None) -> PyTree:
    """Returns arrays of a kernel under a name, by which a policy keeps them; None: as they are."""
    return x if name is None else checkpoint_name(x, name)


def _in_order(x: PyTree) -> PyTree:
    return jax.tree.map(lambda a: with_layout_constraint(a, Layout(tuple(range(a.ndim)))), x)
