"""The model interface that steps use: init and apply over plain nested dicts."""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.sharding.leaf_paths import leaves_with_path
from praxis_lite.core.sharding.logical_axes import MeshAxes
from praxis_lite.core.sharding.weight_spec import WeightSpec

__all__ = ("MdlVars", "Model", "spec_leaves")

# {"params": nested dict, "non_trainable": nested dict} of arrays, specs or shapes.
MdlVars = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class ShardedWeight:
    """A device's block of a weight inside a `jax.shard_map`, created by `core.collectives`.

    Attributes:
      block: This device's block, including padding.
      gather: Takes a block, and returns the complete, unpadded weight. Given one layer of a stacked
        block, it returns the weight of that layer. The gradient with respect to a block is
        the device's block of the weight's gradient, summed over devices.
      path: Path of the weight, used as a name scope for `praxis explain`.
    """

    block: jax.Array
    gather: Callable[[jax.Array], jax.Array]
    path: str = "weights"

    def gathered(self) -> jax.Array:
        """Gathers the complete weight immediately, rather than when a layer reads it."""
        with jax.named_scope(self.path):
            return self.gather(self.block)


class Model(abc.ABC):
    """Base class for models whose variables are plain nested dicts.

    A learner may update "params". "non_trainable" contains the variables that are assigned in a
    forward pass, such as statistics and caches.
    """

    # Maps the paths of packed weights, such as "params/ffn/w", to their packed formats.
    packed_forms: Mapping[str, Any] = {}

    @abc.abstractmethod
    def init(self, key: jax.Array) -> MdlVars:
        """Returns newly initialized variables with logical (unpadded) shapes."""

    @abc.abstractmethod
    def weight_specs(self) -> MdlVars:
        """Returns the tree of `init` with WeightSpecs instead of arrays; creates no arrays."""

    @abc.abstractmethod
    def module(
        self, mdl_vars: MdlVars, key: jax.Array | None = None, eval_key: jax.Array | None = None
    ) -> Any:
        """Returns a module with `mdl_vars`, for one forward pass in a traced step.

        Args:
          mdl_vars: Unpadded arrays, or `ShardedWeight`s, which are gathered when read.
          key: Key for dropout and other random draws in training, or None in evaluation and
            decoding.
          eval_key: Key for the module's random streams in evaluation and decoding. If None, the
            same random numbers are drawn in every pass.
        """

    @abc.abstractmethod
    def non_trainable(self, module: Any) -> dict[str, Any]:
        """Returns the "non_trainable" variables after the forward pass through `module`."""

    def tallies(self, module: Any) -> dict[str, jax.Array]:
        """Returns the module's `Tally` values after the forward pass, keyed by path."""
        return {}

    def moved(self, params: Any, sums: Mapping[str, jax.Array]) -> Any:
        """Applies the rules of the module's `Tally` variables to the weights in `params`."""
        return params

    def abstract_module(self) -> Any:
        """Returns the NNX module with shapes in place of arrays, or None for other models."""
        return None


def abstract_mdl_vars(weight_specs: MdlVars) -> MdlVars:
    """Returns the result of `Model.init` as ShapeDtypeStructs, without tracing it.

    Args:
      weight_specs: Result of `Model.weight_specs`.
    """
    shapes: MdlVars = jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype),
        weight_specs,
        is_leaf=lambda x: isinstance(x, WeightSpec),
    )
    return shapes


def spec_leaves(weight_specs: MdlVars) -> list[tuple[str, WeightSpec]]:
    """Returns (path, WeightSpec) for each leaf of `Model.weight_specs`."""
    return leaves_with_path(weight_specs, is_leaf=lambda x: isinstance(x, WeightSpec))


def gather_sharded(mdl_vars: Any) -> Any:
    """Replaces every `ShardedWeight` in a tree with the complete weight."""
    return jax.tree.map(
        lambda x: x.gathered() if isinstance(x, ShardedWeight) else x,
        mdl_vars,
        is_leaf=lambda x: isinstance(x, ShardedWeight),
    )


def named_dims(
    path: str, declared_by: str, names: tuple[MeshAxes, ...], shape: tuple[int, ...]
) -> tuple[MeshAxes, ...]:
    """Returns `names` extended with None to the rank of `shape`.

    Args:
      path: Path of the weight, for messages.
      declared_by: Description of the declaration, for messages.
      names: Names of the leading dims.
      shape: Shape of the weight.

    Raises:
      ConfigError: There are more names than dims.
    """
    num_excess = len(names) - len(shape)
    if num_excess > 0:
        raise ConfigError(
            f"{path}: {declared_by} has {len(names)} entries, but the weight has {len(shape)} "
            f"dims, {shape}. Remove {num_excess} of them."
        )
    return names + (None,) * -num_excess
