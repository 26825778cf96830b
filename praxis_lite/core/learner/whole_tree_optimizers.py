"""Optimizers that look beyond a weight, found by a trace, and run over all their weights.

Examples are a clip by the global norm inside an optimizer, Prodigy, and noise, which must differ
between layers. They see one tree in which every layer of a stack is a separate weight, as plain
optax sees an unrolled model. Others see the weights of one layer at a time (`weight_groups`).
"""

import dataclasses
import inspect
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

from praxis_lite.core.errors import ConfigError, few, shown
from praxis_lite.core.jaxprs import all_eqns, evaluate_jaxpr
from praxis_lite.core.sharding.weight_spec import WeightSpec

__all__ = ("updates_of",)

PyTree = Any
Path = tuple[str, ...]
_NOTHING: frozenset[int] = frozenset()
_OF_SLOTS = frozenset({-1})  # No number of a weight.
# What optax calls functions that an update is to call.
_FUNCTIONS = ("value_fn", "grad_fn", "obj_fn", "hessian_fn", "grad")
_RANDOM = ("random_", "threefry", "rng_")


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Layers:
    """The layers of a stacked weight as separate leaves; its slots are such nodes too."""

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
    """Returns an optimizer of stacked weights that shows each layer to `optimizer` as a weight.

    Args:
      stack_ranks: how many leading dims of each weight count layers.
    """

    def init(weights: PyTree) -> PyTree:
        return _stacked(optimizer.init(_unstacked(weights, stack_ranks)))

    def update(grads: PyTree, slots: PyTree, weights: PyTree, **more: Any) -> tuple[PyTree, PyTree]:
        like = jax.eval_shape(optimizer.init, _unstacked(weights, stack_ranks))
        grads, weights = (_unstacked(tree, stack_ranks) for tree in (grads, weights))
        updates, new = optimizer.update(grads, _unstacked_as(like, slots), weights, **more)
        return _stacked(updates), _stacked(new)

    return optax.GradientTransformationExtraArgs(init, update)


def updates_of(
    optimizer: optax.GradientTransformation, grads: PyTree, slots: PyTree, weights: PyTree,
    loss: jax.Array,
) -> tuple[PyTree, PyTree]:
    """Returns an optimizer's updates and its new slots; it gets the loss if it takes one."""
    if takes_loss(optimizer):
        return optimizer.update(grads, slots, weights, value=loss)
    return optimizer.update(grads, slots, weights)


def takes_loss(optimizer: optax.GradientTransformation) -> bool:
    """Returns True if an optimizer's update takes the argument `value`, as optax calls the loss."""
    if not isinstance(optimizer, optax.GradientTransformationExtraArgs):
        return False
    parameters = inspect.signature(optimizer.update).parameters.values()
    return any(item.name == "value" or item.kind is item.VAR_KEYWORD for item in parameters)


def looks_beyond(
    optimizer: optax.GradientTransformation, weight_specs: Mapping[Path, WeightSpec], owner: str
) -> bool:
    """Returns True if an optimizer's update of a weight depends on other weights, or on chance.

    It is traced with logical shapes, and two layers for each stack.

    Args:
      weight_specs: of all weights that it updates.
      owner: of the setting `optimizer`, for the message.

    Raises:
      ConfigError: it needs more than a training step has, such as a function to call again, or
        returns updates of other shapes.
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
        _refuse_what_optax_refuses(error, owner)
        return False  # It may need something that exists only in a step, such as a mesh.
    shapes = [[leaf.shape for leaf in jax.tree.leaves(item)] for item in (updates, tree)]
    if shapes[0] != shapes[1]:
        raise ConfigError(
            f"{owner}.optimizer returns updates of shapes {few(list(map(str, shapes[0])))} for "
            f"weights of shapes {few(list(map(str, shapes[1])))}. Each update has to have the "
            "shape of its weight."
        )
    count = len(jax.tree.leaves(tree))
    numbers = [frozenset({number}) for number in range(count)]
    others = [_OF_SLOTS] * (len(traced.jaxpr.invars) - 2 * count)
    reader = _Reader()
    results = reader.read(traced.jaxpr, [*numbers, *numbers, *others])
    return reader.draws or any(len(read - _OF_SLOTS) > 1 for read in results)


def _refuse_what_optax_refuses(error: Exception, owner: str) -> None:
    """Raises ConfigError if an update of optax cannot be made in a training step."""
    words = " ".join(str(error).split())
    wanted = next((name for name in _FUNCTIONS if re.search(rf"\b{name}\b", words)), None)
    if wanted is not None:
        raise ConfigError(
            f"{owner}.optimizer wants {wanted} with each update ({words}): it computes the loss or "
            "its gradient again within a step, as line searches do, and a training step makes "
            "them once. Take one that does not, such as optax.adamw, or optax.lbfgs with "
            "linesearch=None and a learning rate."
        ) from None
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if "/jax/" not in frame.filename.replace("\\", "/")]
    if outside and "/optax/" in outside[-1].filename.replace("\\", "/"):
        raise ConfigError(
            f"{owner}.optimizer: optax ({outside[-1].name}) cannot update these weights: "
            f"{shown(words, 500)} A training step has one gradient of each weight, of its whole "
            "batch: optimizers of gradients per example, as for differential privacy, do not fit."
        ) from None


def _unstacked(tree: PyTree, stack_ranks: Mapping[Path, int]) -> PyTree:
    def opened(node: Any, path: Path) -> Any:
        if isinstance(node, Mapping):
            return {name: opened(child, (*path, name)) for name, child in node.items()}
        stack_shape = node.shape[: stack_ranks.get(path, 0)]
        return _layers_of(node, stack_shape) if stack_shape else node

    return opened(tree, ())


def _unstacked_as(like: PyTree, stacked: PyTree) -> PyTree:
    """Returns `stacked` with nodes of layers, and random keys, where `like` has them."""

    def opened(node: Any, x: Any) -> Any:
        if isinstance(node, Layers):
            return _layers_of(x, node.stack_shape)
        return jax.random.wrap_key_data(x) if _is_key(node) else x

    return jax.tree.map(opened, like, stacked, is_leaf=_is_layers)


def _layers_of(tree: PyTree, stack_shape: tuple[int, ...]) -> Layers:
    """Returns the layers of an array, or of a tree of arrays, as slots of a weight may be."""
    flat = jax.tree.map(lambda x: jnp.reshape(x, (-1, *x.shape[len(stack_shape) :])), tree)
    layers = (jax.tree.map(operator.itemgetter(i), flat) for i in range(math.prod(stack_shape)))
    return Layers(tuple(layers), stack_shape)


def _stacked(tree: PyTree) -> PyTree:
    def closed(node: Any) -> Any:
        if isinstance(node, Layers):
            shape = node.stack_shape
            return jax.tree.map(
                lambda *layers: jnp.reshape(jnp.stack(layers), (*shape, *layers[0].shape)),
                *node.layers,
            )
        # Numbers, which a checkpoint can hold, in place of a random key.
        return jax.random.key_data(node) if _is_key(node) else node

    return jax.tree.map(closed, tree, is_leaf=_is_layers)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _is_layers(node: Any) -> bool:
    return isinstance(node, Layers)


class _Reader:
    """Follows the dependencies of a program's results.

    Attributes:
      draws: True if random numbers were drawn with a key that is not a constant.
    """

    def __init__(self):
        self.draws = False

    def read(self, jaxpr: Any, given: Sequence[frozenset[int]]) -> list[frozenset[int]]:
        """Returns the weights that each result depends on; `given`: those of each argument."""
        return evaluate_jaxpr(jaxpr, given, self._results, lambda *_: _NOTHING)

    def _results(self, eqn: Any, read: list[frozenset[int]]) -> list[frozenset[int]]:
        if eqn.primitive.name == "cond":
            branches = [self.read(branch, read[1:]) for branch in eqn.params["branches"]]
            return [_union(read[0], *ways) for ways in zip(*branches, strict=True)]
        inner = list(jaxprs_in_params(eqn.params))
        is_call = eqn.primitive.name not in ("scan", "while") and len(inner) == 1
        if is_call and len(inner[0].invars) == len(read):
            return self.read(inner[0], read)
        is_random = any(item.primitive.name.startswith(_RANDOM) for item in all_eqns([eqn]))
        self.draws |= is_random and any(read)
        return [_union(*read)] * len(eqn.outvars)


def _union(*read: frozenset[int]) -> frozenset[int]:
    """Returns at most two of the weights that any operand depends on.

    All of them would cost the square of the number of weights after a norm of all gradients.
    """
    union = _NOTHING.union(*read)
    return frozenset(sorted(union, reverse=True)[:2]) | (union & _OF_SLOTS)
