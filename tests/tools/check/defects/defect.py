"""A planted defect: what is broken, in which experiment, and which part of a check meets it."""

import contextlib
import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from praxis_lite import Experiment
from praxis_tools.check import Certificate, check_on_meshes
from praxis_tools.check.certificate import FirstDifference

TRAINING = ("training",)


@dataclasses.dataclass(frozen=True)
class Defect:
    """What is broken.

    Attributes:
      name: in words; each defect has its own.
      experiment: in which it is planted.
      planted: makes a context in which it is there.
      mesh: to check on.
      parts: of a check, which alone are made.
      axis: that the check is to name, or None if it may name any.
      layer: likewise; a part of the path is enough.
      steps: of training.
    """

    name: str
    experiment: type[Experiment]
    planted: Callable[[], contextlib.AbstractContextManager[Any]]
    mesh: tuple[int, ...]
    parts: Sequence[str] = TRAINING
    axis: str | None = None
    layer: str = ""
    steps: int = 2

    def certificate(self) -> Certificate:
        """Returns the certificate of a check with the defect in place."""
        with self.planted():
            return check_on_meshes(self.experiment, [self.mesh], steps=self.steps, parts=self.parts)

    def missed(self, first: FirstDifference | None) -> str:
        """Returns a sentence on the part of this defect that a check missed, or ""."""
        if first is None:
            return "not caught"
        if self.axis is not None and first.axis != self.axis:
            return f"axis {first.axis} instead of {self.axis}"
        return "" if self.layer in first.layer else f"layer {first.layer} instead of {self.layer}"


def replaced(target: str, new: Callable[[Any], Any]) -> Callable[[], Any]:
    """Returns a maker of contexts in which an attribute is `new(old)`.

    Args:
      target: "package.module:attribute" or "package.module:Class.attribute".
    """
    module, _, path = target.partition(":")

    @contextlib.contextmanager
    def planted() -> Iterator[None]:
        *owners, name = path.split(".")
        owner = functools.reduce(getattr, owners, importlib.import_module(module))
        with mock.patch.object(owner, name, new(inspect.getattr_static(owner, name))):
            yield

    return planted


def after(target: str, change: Callable[..., Any]) -> Callable[[], Any]:
    """Returns a planter of `change(result, *args)` around a function."""

    def new(old: Any) -> Any:
        plain = old.__func__ if isinstance(old, staticmethod | classmethod) else old

        @functools.wraps(plain)
        def changed(*args: Any, **kwargs: Any) -> Any:
            return change(plain(*args, **kwargs), *args)

        return changed

    return replaced(target, new)


def num_devices(*axes: str) -> int:
    """Returns how many devices the mesh of the program that is traced has along some axes."""
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    number = 1
    for axis in axes or sizes:
        number *= sizes.get(axis, 1)
    return number


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def with_gradient_times(x: jax.Array, factor: float) -> jax.Array:
    """Returns x, whose gradient is multiplied: as one that is summed too often."""
    return x


with_gradient_times.defvjp(lambda x, _: (x, None), lambda factor, _, g: (g * factor,))


def first_part(x: jax.Array, num_parts: int, dim: int = -1) -> jax.Array:
    """Returns x with zeros in all but the first of its parts, as where a sum is not made."""
    size = -(-x.shape[dim] // num_parts)
    index = jax.lax.broadcasted_iota(jnp.int32, x.shape, dim % x.ndim)
    return jnp.where(index < size, x, 0)
