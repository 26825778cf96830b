"""How parameters are updated: clipping, an optax optimizer, and the steps that are skipped.

Stacked weights are updated one layer at a time (`jax.vmap` over the stack), so an optimizer that
looks at whole tensors, such as Adafactor or LAMB, trains a scanned stack as an unrolled one. Pax
does the same with its vectorized variable prefixes.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from praxis_lite.errors import ConfigError
from praxis_lite.weights import WeightSpec

PyTree = Any
Schedule = Callable[[jax.Array], jax.Array]


class Learner:
    """Returns updated parameters and slots for gradients.

    Args:
      optimizer: called with `learning_rate`, returns the optax transformation; an
        `fdl.Partial(optax.adamw, b2=0.98)` for instance.
      learning_rate: a number, or a schedule of the number of updates made.
      clip_gradient_norm_to_value: the most that the global norm of the gradients may be; 0: no
        clipping.
    """

    def __init__(
        self,
        optimizer: Callable[..., optax.GradientTransformation],
        learning_rate: float | Schedule,
        *,
        clip_gradient_norm_to_value: float = 0.0,
    ):
        if clip_gradient_norm_to_value < 0:
            raise ConfigError(
                f"Learner.clip_gradient_norm_to_value is {clip_gradient_norm_to_value}; wanted is "
                "a positive norm, or 0 for no clipping."
            )
        self.learning_rate = learning_rate
        self.clip_gradient_norm_to_value = clip_gradient_norm_to_value
        self.optimizer = optimizer(learning_rate=learning_rate)

    def init(self, params: PyTree, weight_specs: PyTree) -> dict[str, PyTree]:
        """Returns the slots: a count of skipped steps and, per stack shape, the optimizer's own."""
        return {
            "num_skipped_steps": jnp.zeros((), jnp.int32),
            "slots": {
                name: vmap_over(stack_shape, self.optimizer.init)(group)
                for name, (stack_shape, group) in group_by_stack(params, weight_specs).items()
            },
        }

    def update(
        self, grads: PyTree, opt_states: dict[str, PyTree], params: PyTree, weight_specs: PyTree,
        loss: jax.Array, step: jax.Array,
    ) -> tuple[PyTree, dict[str, PyTree], dict[str, jax.Array]]:
        """Returns (params, opt_states, scalars grad_norm, learning_rate, num_skipped_steps).

        A step whose loss or gradient is not finite changes neither parameters nor slots, and is
        counted; the schedule does not advance with it.
        """
        grad_norm = optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), grads))
        is_finite = jnp.isfinite(grad_norm) & jnp.isfinite(loss)
        learning_rate = self.learning_rate
        if callable(learning_rate):
            learning_rate = learning_rate(step - opt_states["num_skipped_steps"])
        if self.clip_gradient_norm_to_value:
            scale = jnp.minimum(1.0, self.clip_gradient_norm_to_value / grad_norm)
            grads = jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads)
        grads_by_group = group_by_stack(grads, weight_specs)
        new_params, slots = {}, {}
        for name, (stack_shape, group) in group_by_stack(params, weight_specs).items():
            update = vmap_over(stack_shape, self.optimizer.update)
            updates, slots[name] = update(grads_by_group[name][1], opt_states["slots"][name], group)
            new_params = _merged(new_params, optax.apply_updates(group, updates))

        def keep_if_skipped(new: PyTree, old: PyTree) -> PyTree:
            return jax.tree.map(lambda n, o: jnp.where(is_finite, n, o), new, old)

        num_skipped_steps = opt_states["num_skipped_steps"] + jnp.where(is_finite, 0, 1)
        scalars = {
            "grad_norm": grad_norm,
            "learning_rate": jnp.asarray(learning_rate, jnp.float32),
            "num_skipped_steps": num_skipped_steps,
        }
        new_opt_states = {
            "num_skipped_steps": num_skipped_steps,
            "slots": keep_if_skipped(slots, opt_states["slots"]),
        }
        return keep_if_skipped(new_params, params), new_opt_states, scalars


def group_by_stack(
    tree: PyTree, weight_specs: PyTree
) -> dict[str, tuple[tuple[int, ...], dict[str, Any]]]:
    """Returns, per stack shape, its name, the shape, and the nested dict of just its leaves.

    Weights without a stacked dim are "unstacked"; those of a scanned stack of 7 are "stack_7".
    """
    groups: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {}

    def visit(node: Any, specs: Any, path: tuple[str, ...]) -> None:
        if isinstance(specs, WeightSpec):
            stack_shape = specs.stack_shape
            name = "stack_" + "x".join(map(str, stack_shape)) if stack_shape else "unstacked"
            target = groups.setdefault(name, (stack_shape, {}))[1]
            for part in path[:-1]:
                target = target.setdefault(part, {})
            target[path[-1]] = node
            return
        for name, child in specs.items():
            visit(node[name], child, (*path, name))

    visit(tree, weight_specs, ())
    return groups


def vmap_over(stack_shape: tuple[int, ...], fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Returns `fn` mapped over the leading dims of all its arguments, one per stacked dim."""
    for _ in stack_shape:
        fn = jax.vmap(fn)
    return fn


def _merged(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Returns the nested dict that holds the leaves of both."""
    merged = dict(a)
    for name, value in b.items():
        merged[name] = _merged(merged[name], value) if name in merged else value
    return merged
