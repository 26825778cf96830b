"""Detects optimizers whose updates depend on several weights; applies them to all weights at once.

Examples are optimizers that clip by the global norm, Prodigy, and optimizers that add noise, which
must differ between layers. These optimizers receive one tree in which every layer of a stack is a
separate leaf, as if the model were unrolled. Other optimizers update one layer at a time
(`weight_groups`).
"""

import dataclasses
import math
import operator
import re
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import unflatten_dict
from jax.extend.core import jaxprs_in_params

from praxis_lite.core.errors import ConfigError, first_few, shortened
from praxis_lite.core.jaxprs import all_eqns, evaluate_jaxpr
from praxis_lite.core.learner.optimizer_factories import updates_of
from praxis_lite.core.sharding.weight_spec import WeightSpec

PyTree = Any
Path = tuple[str, ...]
_NOTHING: frozenset[int] = frozenset()
_SLOTS = frozenset({-1})  # Denotes slots in sets of weight indices.
# optax's names for functions that an update may require.
_FUNCTIONS = ("value_fn", "grad_fn", "obj_fn", "hessian_fn", "grad")
_RANDOM = ("random_", "threefry", "rng_")


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Layers:
    """The layers of a stacked weight, or of its slots, as separate leaves."""

    layers: tuple[Any, ...]
    stack_shape: tuple[int, ...]

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        return self.layers, self.stack_shape

    @classmethod
    def tree_unflatten(cls, stack_shape: tuple[int, ...], layers: Sequence[Any]) -> "Layers":
        return cls(tuple(layers), stack_shape)


def over_whole_tree(
    optimizer: optax.GradientTransformation, stack_ranks: Mapping[Path, int]
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that it updates stacked weights as separate layers.

    Args:
      optimizer: Updates a tree in which each layer is a leaf (see `Layers`).
      stack_ranks: Maps the path of a weight to the number of its leading dims that stack layers.
    """

    def init(weights: PyTree) -> PyTree:
        return _stacked(optimizer.init(_unstacked(weights, stack_ranks)))

    def update(grads: PyTree, slots: PyTree, weights: PyTree, **more: Any) -> tuple[PyTree, PyTree]:
        # Slots are stored as stacks. The shapes specify how to unstack each of them.
        shapes = jax.eval_shape(optimizer.init, _unstacked(weights, stack_ranks))
        grads, weights = (_unstacked(tree, stack_ranks) for tree in (grads, weights))
        updates, new = optimizer.update(grads, _unstacked_as(shapes, slots), weights, **more)
        return _stacked(updates), _stacked(new)

    return optax.GradientTransformationExtraArgs(init, update)


def couples_weights(
    optimizer: optax.GradientTransformation, weight_specs: Mapping[Path, WeightSpec], owner: str
) -> bool:
    """Returns whether the update for a weight depends on other weights or on random numbers.

    To find out, the update is traced with logical shapes and two layers per stack.

    Args:
      optimizer: The optimizer.
      weight_specs: WeightSpecs of all weights that the optimizer updates, keyed by path.
      owner: Name of the class with the `optimizer` setting, for messages.

    Raises:
      ConfigError: The optimizer requires arguments that a training step does not provide, such as a
        function to reevaluate the loss, or returns updates whose shapes differ from those of the
        weights.
    """

    def leaf_of(spec: WeightSpec) -> Any:
        rank = len(spec.stack_shape)
        leaf = jax.ShapeDtypeStruct(spec.shape[rank:], spec.dtype)
        return Layers((leaf, leaf), (2,)) if rank else leaf

    tree = unflatten_dict({path: leaf_of(spec) for path, spec in weight_specs.items()})

    def update(grads: PyTree, weights: PyTree, slots: PyTree, loss: jax.Array) -> Any:
        return updates_of(optimizer, grads, slots, weights, loss)

    try:
        slots = jax.eval_shape(optimizer.init, tree)
        loss = jax.ShapeDtypeStruct((), jnp.float32)
        traced, (updates, _) = jax.make_jaxpr(update, return_shape=True)(tree, tree, slots, loss)
    except Exception as error:
        _raise_if_unsupported(error, owner)
        return False  # The update may only be traceable in a step, for example if it uses the mesh.
    shapes = [[leaf.shape for leaf in jax.tree.leaves(x)] for x in (updates, tree)]
    if shapes[0] != shapes[1]:
        raise ConfigError(
            f"{owner}.optimizer returns updates of shapes {first_few(list(map(str, shapes[0])))} "
            f"for weights of shapes {first_few(list(map(str, shapes[1])))}; expected an update of "
            "the same shape for each weight. Use a different optimizer."
        )
    # The arguments of the jaxpr are gradients, weights, slots and the loss. The gradient and the
    # weight with the same index count as one; a result that reads two indices couples two weights.
    num_weights = len(jax.tree.leaves(tree))
    weights = [frozenset({index}) for index in range(num_weights)]
    others = [_SLOTS] * (len(traced.jaxpr.invars) - 2 * num_weights)
    tracker = _DependencyTracker()
    results = tracker.trace(traced.jaxpr, [*weights, *weights, *others])
    return tracker.draws or any(len(read - _SLOTS) > 1 for read in results)


def _raise_if_unsupported(error: Exception, owner: str) -> None:
    """Raises ConfigError if an optax optimizer cannot be used in a training step."""
    text = " ".join(str(error).split())
    function = next((name for name in _FUNCTIONS if re.search(rf"\b{name}\b", text)), None)
    if function is not None:
        raise ConfigError(
            f"{owner}.optimizer requires {function} to reevaluate the loss or its gradient in each "
            f"update, like a line search ({text}), but a training step evaluates each only once. "
            "Use an optimizer that does not reevaluate them, such as optax.adamw, or optax.lbfgs "
            "with linesearch=None and a learning rate."
        ) from None
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if "/jax/" not in frame.filename.replace("\\", "/")]
    if outside and "/optax/" in outside[-1].filename.replace("\\", "/"):
        raise ConfigError(
            f"{owner}.optimizer: optax ({outside[-1].name}) cannot update these weights: "
            f"{shortened(text, 500)} A training step computes one gradient per weight for the "
            "complete batch. Optimizers that require per-example gradients, for example for "
            "differential privacy, are not supported."
        ) from None


def _unstacked(tree: PyTree, stack_ranks: Mapping[Path, int]) -> PyTree:
    def unstack(node: Any, path: Path) -> Any:
        if isinstance(node, Mapping):
            return {name: unstack(child, (*path, name)) for name, child in node.items()}
        stack_shape = node.shape[: stack_ranks.get(path, 0)]
        return _layers_of(node, stack_shape) if stack_shape else node

    return unstack(tree, ())


def _unstacked_as(like: PyTree, stacked: PyTree) -> PyTree:
    """Converts subtrees of `stacked` to `Layers` or random keys where `like` has such nodes."""

    def unstack(node: Any, x: Any) -> Any:
        if isinstance(node, Layers):
            return _layers_of(x, node.stack_shape)
        return jax.random.wrap_key_data(x) if _is_key(node) else x

    return jax.tree.map(unstack, like, stacked, is_leaf=_is_layers)


def _layers_of(tree: PyTree, stack_shape: tuple[int, ...]) -> Layers:
    """Splits a stacked array, or a tree of stacked arrays such as slots, into layers."""
    flat = jax.tree.map(lambda x: jnp.reshape(x, (-1, *x.shape[len(stack_shape) :])), tree)
    layers = (jax.tree.map(operator.itemgetter(i), flat) for i in range(math.prod(stack_shape)))
    return Layers(tuple(layers), stack_shape)


def _stacked(tree: PyTree) -> PyTree:
    def stack(node: Any) -> Any:
        if isinstance(node, Layers):
            shape = node.stack_shape
            return jax.tree.map(
                lambda *layers: jnp.reshape(jnp.stack(layers), (*shape, *layers[0].shape)),
                *node.layers,
            )
        # Checkpoints can store the data of a random key, but not the key itself.
        return jax.random.key_data(node) if _is_key(node) else node

    return jax.tree.map(stack, tree, is_leaf=_is_layers)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _is_layers(node: Any) -> bool:
    return isinstance(node, Layers)


class _DependencyTracker:
    """Tracks which weights the results of a jaxpr depend on.

    Attributes:
      draws: Whether random numbers are drawn with a key that is not a constant.
    """

    def __init__(self) -> None:
        self.draws = False

    def trace(self, jaxpr: Any, given: Sequence[frozenset[int]]) -> list[frozenset[int]]:
        """Returns the indices of the weights that each result depends on.

        Args:
          jaxpr: The jaxpr to trace.
          given: Indices of the weights that each argument depends on.
        """
        return evaluate_jaxpr(jaxpr, given, self._results, lambda *_: _NOTHING)

    def _results(self, eqn: Any, read: list[frozenset[int]]) -> list[frozenset[int]]:
        if eqn.primitive.name == "cond":
            branches = [self.trace(branch, read[1:]) for branch in eqn.params["branches"]]
            return [_union(read[0], *results) for results in zip(*branches, strict=True)]
        inner = list(jaxprs_in_params(eqn.params))
        is_call = eqn.primitive.name not in ("scan", "while") and len(inner) == 1
        if is_call and len(inner[0].invars) == len(read):
            return self.trace(inner[0], read)
        # For other operations, assume that every result depends on every operand.
        is_random = any(inner.primitive.name.startswith(_RANDOM) for inner in all_eqns([eqn]))
        self.draws |= is_random and any(read)
        return [_union(*read)] * len(eqn.outvars)


def _union(*read: frozenset[int]) -> frozenset[int]:
    """Returns the union of sets of weight indices, truncated to two indices.

    Two indices suffice to show that weights are coupled. Without truncation, the cost after a
    global norm would be quadratic in the number of weights.
    """
    union = _NOTHING.union(*read)
    return frozenset(sorted(union, reverse=True)[:2]) | (union & _SLOTS)
