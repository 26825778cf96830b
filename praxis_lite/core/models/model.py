"""The interface that steps need from a model: init and apply over plain nested dicts."""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from praxis_lite.core.errors import ConfigError
from praxis_lite.core.sharding.leaf_paths import leaves_with_path
from praxis_lite.core.sharding.weight_spec import WeightSpec

__all__ = ("MdlVars", "Model", "spec_leaves")

# {"params": nested dict, "non_trainable": nested dict}, of arrays or of what describes them.
MdlVars = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class ShardedWeight:
    """A device's block of a weight, inside `jax.shard_map`; `core.collectives` makes them.

    Attributes:
      block: this device's part, padding included.
      gather: from the block, or one layer's part of it where the weight is stacked, to the whole
        without padding; the gradient comes back as this device's part of the sum over devices.
      path: of the weight, for --mode=explain.
    """

    block: jax.Array
    gather: Callable[[jax.Array], jax.Array]
    path: str = "weights"

    def whole(self) -> jax.Array:
        """Returns the weight, gathered here rather than where a layer reads it."""
        with jax.named_scope(self.path):
            return self.gather(self.block)


class Model(abc.ABC):
    """A model as the trees of its variables, split once, outside every step.

    A learner may touch "params"; "non_trainable" is what a pass assigns (statistics, caches).
    """
    # By path, "params/ffn/w": the forms of weights that are kept as something else.
    packed_forms: Mapping[str, Any] = {}

    @abc.abstractmethod
    def init(self, key: jax.Array) -> MdlVars:
        """Returns freshly drawn variables, without the padding of any mesh."""

    @abc.abstractmethod
    def weight_specs(self) -> MdlVars:
        """Returns the tree of `init` with a WeightSpec at each leaf; no array is made."""

    @abc.abstractmethod
    def module(
        self, mdl_vars: MdlVars, key: jax.Array | None = None, eval_key: jax.Array | None = None
    ) -> Any:
        """Returns the module that a task calls, with `mdl_vars` in it, for a pass of a traced step.

        Args:
          mdl_vars: unpadded arrays, or `ShardedWeight`s, which are gathered when used.
          key: for dropout and other draws in training; None: evaluation or decoding.
          eval_key: for what the module's own random streams draw in evaluation or decoding; None:
            the same numbers in every pass.
        """

    @abc.abstractmethod
    def non_trainable(self, module: Any) -> dict[str, Any]:
        """Returns the "non_trainable" variables as the pass through `module` left them."""

    def tallies(self, module: Any) -> dict[str, jax.Array]:
        """Returns the counts of the pass through `module`, by path: see `Tally`."""
        return {}

    def moved(self, params: Any, sums: Mapping[str, jax.Array]) -> Any:
        """Returns `params` with the weights set that follow tallies, given their sums by path."""
        return params

    def abstract_module(self) -> Any:
        """Returns the NNX module with shapes for arrays; None of a model of another kind."""
        return None


def abstract_mdl_vars(weight_specs: MdlVars) -> MdlVars:
    """Returns a jax.ShapeDtypeStruct for each weight: the shapes of `Model.init`, without a trace.

    Args:
      weight_specs: of `Model.weight_specs`.
    """
    return jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), weight_specs,
        is_leaf=lambda x: isinstance(x, WeightSpec),
    )


def spec_leaves(weight_specs: MdlVars) -> list[tuple[str, WeightSpec]]:
    """Returns (path, WeightSpec) for each leaf of `Model.weight_specs`."""
    return leaves_with_path(weight_specs, is_leaf=lambda x: isinstance(x, WeightSpec))


def whole(mdl_vars: Any) -> Any:
    """Returns the tree with each `ShardedWeight` gathered."""
    return jax.tree.map(
        lambda x: x.whole() if isinstance(x, ShardedWeight) else x, mdl_vars,
        is_leaf=lambda x: isinstance(x, ShardedWeight),
    )


def named_dims(path: str, declared_by: str, names: tuple, shape: tuple[int, ...]) -> tuple:
    """Returns the names that a declaration gives to dims, with None for the last dims without.

    Raises:
      ConfigError: there are more names than dims; names `path`.
    """
    num_over = len(names) - len(shape)
    if num_over > 0:
        raise ConfigError(
            f"{path}: {declared_by} has {len(names)} entries, but the weight has {len(shape)} "
            f"dims, {shape}. Remove {num_over} of them."
        )
    return names + (None,) * -num_over
