"""A job's logical axis rules as Flax reads them while a step is traced."""

import contextlib
from collections.abc import Iterator

import jax
from flax.core import spmd

from praxis_lite.core.sharding.weight_sharding import WeightSharding, check_axes


@contextlib.contextmanager
def flax_axis_rules(weight_sharding: WeightSharding | None) -> Iterator[None]:
    """Sets the job's logical axis rules as Flax's, for what constrains activations by names.

    `nn.with_logical_constraint` and NNX's metadata read them while a step is traced. Without rules
    nothing is set, and the caller's own context stays.

    Raises:
      ConfigError: a rule has an axis that the mesh of the context, if any, has not.
    """
    rules = weight_sharding.rules_in_use if weight_sharding is not None else ()
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        check_axes(rules, mesh.shape)
    with spmd.logical_axis_rules(rules) if rules else contextlib.nullcontext():
        yield
