"""What the steps need of a model, whoever wrote it: init and apply over plain nested dicts."""

import abc
from typing import Any

import jax

from praxis_lite.sharding import WeightSpec

# {"params": nested dict, "non_trainable": nested dict}, of arrays or of what describes them.
MdlVars = dict[str, Any]


class Model(abc.ABC):
    """A model as the trees of its variables, split once, outside every step.

    A learner may touch "params"; "non_trainable" is what a pass assigns (statistics, caches).
    """

    @abc.abstractmethod
    def init(self, key: jax.Array) -> MdlVars:
        """Returns freshly drawn variables, each at its true shape."""

    @abc.abstractmethod
    def weight_specs(self) -> MdlVars:
        """Returns the tree of `init` with a WeightSpec at each leaf; no array is made."""

    @abc.abstractmethod
    def module(
        self,
        mdl_vars: MdlVars,
        key: jax.Array | None = None,
        eval_key: jax.Array | None = None,
    ) -> Any:
        """Returns what a task calls, with `mdl_vars` in it, for one pass of a traced step.

        Args:
          mdl_vars: arrays of true shapes, or `ShardedWeight`s, which are gathered when used.
          key: for dropout and the like in training; None: evaluation or decoding.
          eval_key: of what the module draws in evaluation or decoding all the same, by streams of
            its own; None: the same numbers in every pass.
        """

    @abc.abstractmethod
    def non_trainable(self, module: Any) -> dict[str, Any]:
        """Returns the "non_trainable" variables as the pass through `module` left them."""


def spec_leaves(weight_specs: MdlVars) -> list[tuple[str, WeightSpec]]:
    """Returns (path, WeightSpec) for each leaf of `Model.weight_specs`."""
    leaves = jax.tree_util.tree_flatten_with_path(
        weight_specs, is_leaf=lambda x: isinstance(x, WeightSpec)
    )[0]
    return [(jax.tree_util.keystr(p, simple=True, separator="/"), spec) for p, spec in leaves]
