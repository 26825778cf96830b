"""Updates a model's weights and optimizer state, and skips steps with invalid gradients."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from praxis_lite.core.learner.gradient_limits import global_norm
from praxis_lite.core.learner.optimizer_factories import rate_at, updates_of
from praxis_lite.core.learner.optimizer_groups import matched_paths
from praxis_lite.core.learner.path_masks import collected_patterns
from praxis_lite.core.learner.schedule_free import evaluation_params
from praxis_lite.core.learner.weight_groups import WeightGroups, merged
from praxis_lite.core.sharding.devices.axis_types import typed_as
from praxis_lite.core.sharding.mesh import compiled_platform
from praxis_lite.core.sharding.weight_spec import spec_items

__all__ = ("BoundLearner", "SCOPE")

PyTree = Any

SCOPE = "learner"  # Name scope of the operations of an update.


@dataclasses.dataclass
class BoundLearner:
    """A learner that is bound to a model's weights; created by `Learner.bind`.

    Attributes:
      settings: The Learner, which holds the settings.
      groups: Groups of weights with their optimizers.
      weights_with_host_slots: Paths of the weights whose slots are stored in host memory.
      layouts: StateLayouts of the trained "params" and of each entry of opt_states, keyed by name.
        Set by the partitioner if any of these params or states are in host memory; otherwise empty.
    """

    settings: Any  # A Learner, whose module imports this module.
    groups: WeightGroups
    weights_with_host_slots: frozenset[str] = frozenset()
    layouts: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def init(self, params: PyTree) -> dict[str, PyTree]:
        """Returns opt_states: counts of updates and skipped steps, and "slots" (keyed by group).

        Depending on the learner's settings, opt_states also contain "ema" (the moving average of
        the trained weights) and "loss_scale".

        Raises:
          ConfigError: A pattern in a mask matches no weight.
        """
        learner = self.settings
        # Creating the slots applies all masks, whose patterns must each match a weight.
        with collected_patterns() as patterns:
            slots = {
                name: group.per_layer(group.optimizer.init)(group.select(params))
                for name, group in self.groups.by_name.items()
            }
        paths = ["/".join(path) for path, _ in spec_items(self.groups.weight_specs)]
        matched_paths(paths, sorted(patterns), "A mask of an optimizer of the Learner")
        opt_states: dict[str, PyTree] = {
            "num_updates": jnp.zeros((), jnp.int32),
            "num_skipped_steps": jnp.zeros((), jnp.int32),
            "num_skipped_in_a_row": jnp.zeros((), jnp.int32),
            "slots": slots,
        }
        if learner.ema_decay:
            # Copy the weights, because donation fails if the state contains an array twice.
            opt_states["ema"] = jax.tree.map(jnp.copy, self.groups.split(params)[0])
        if learner.loss_scale is not None:
            opt_states["loss_scale"] = learner.loss_scale.init()
        return opt_states

    @jax.named_scope(SCOPE)
    def update(
        self, grads: PyTree, opt_states: dict[str, PyTree], params: PyTree, loss: jax.Array
    ) -> tuple[PyTree, dict[str, PyTree], dict[str, jax.Array], jax.Array]:
        """Returns (params, opt_states, scalars, is_skipped) after a step.

        A step is skipped if its loss, gradient or learning rate is not finite, or if its gradient
        is too large. When a step is skipped, the counts of skipped steps are incremented, but
        weights, slots and averages do not change, and schedules do not advance.

        Args:
          grads: Float32 gradients of the trained weights.
          opt_states: Optimizer states, as returned by `init` or the previous update.
          params: All weights.
          loss: Scalar loss of the step.

        Returns:
          A tuple (params, opt_states, scalars, is_skipped). The scalars are grad_norm (before
          clipping), learning_rate, learning_rate/NAME for each auxiliary optimizer,
          num_skipped_steps and num_skipped_in_a_row. If the learner skips steps with large
          gradients, the scalars include is_gradient_too_large (0 or 1). If the learner scales the
          loss, the scalars include loss_scale, the scale used in this step.
        """
        learner, groups = self.settings, self.groups
        trainable, frozen = groups.split(params)

        def grads_on_device() -> PyTree:
            return groups.lay_out(self._to_device({"params": grads})["params"])

        # First decide whether to keep the step, from the loss, the norms and the rates.
        grads_for_norms = grads_on_device()
        grad_norm = global_norm(grads_for_norms)
        # A single NaN or infinity, even in only one microbatch, makes the norm non-finite.
        is_finite = jnp.isfinite(grad_norm) & jnp.isfinite(loss)
        # With separate scaling, each optimizer has its own norm; otherwise all use the global norm.
        norms = dict.fromkeys(learner.limits_by_optimizer, grad_norm)
        if learner.apply_separate_scaling:
            by_optimizer = groups.by_optimizer(grads_for_norms)
            norms = {name: global_norm(local) for name, local in by_optimizer.items()}
        is_small = jnp.stack([learner.limits.accepts_step(norm) for norm in norms.values()]).all()
        num_updates = opt_states["num_updates"]
        rates = {"learning_rate": rate_at(learner.learning_rate, num_updates)}
        for aux in learner.auxiliary_optimizers:
            rates[f"learning_rate/{aux.name}"] = rate_at(aux.learning_rate, num_updates)
        is_kept = is_finite & is_small & jnp.isfinite(jnp.stack(list(rates.values()))).all()

        def compute_update(stored: dict[str, PyTree]) -> dict[str, PyTree]:
            old = self._to_device(stored)
            weights = old["params"]
            # Transfer gradients in host memory again, because keeping them on the device after
            # computing the norms would use too much memory.
            local = grads_on_device() if self.layouts else grads_for_norms
            updates, slots = self._updates(local, norms, old["slots"], weights, loss)
            new = {"slots": slots, "params": optax.apply_updates(weights, updates)}
            if learner.ema_decay:
                new["ema"] = moving_average(old["ema"], weights, learner.ema_decay, num_updates)
            # Some optimizers return slots whose dtypes differ from the dtypes returned by their
            # `init`.
            new = jax.tree.map(lambda n, o: typed_as(n.astype(o.dtype), o), new, old)
            return self._to_storage(new)

        old = {name: opt_states[name] for name in ("slots", "ema") if name in opt_states}
        use_cond = compiled_platform() == "cpu" or bool(self.layouts)
        new = _update_if(is_kept, compute_update, old | {"params": trainable}, use_cond=use_cond)
        trainable = groups.lay_out(new.pop("params"))
        # Counts change in skipped steps, too, so they are updated outside of `_update_if`.
        new |= {
            "num_updates": num_updates + jnp.where(is_kept, 1, 0),
            "num_skipped_steps": opt_states["num_skipped_steps"] + jnp.where(is_kept, 0, 1),
            "num_skipped_in_a_row": jnp.where(is_kept, 0, opt_states["num_skipped_in_a_row"] + 1),
        }
        scalars = {
            "grad_norm": grad_norm,
            "num_skipped_steps": new["num_skipped_steps"],
            "num_skipped_in_a_row": new["num_skipped_in_a_row"],
            **rates,
        }
        if learner.limits.skip_step_gradient_norm_value:
            scalars["is_gradient_too_large"] = jnp.where(is_finite & ~is_small, 1.0, 0.0)
        if learner.loss_scale is not None:
            new["loss_scale"] = learner.loss_scale.update(opt_states["loss_scale"], is_finite)
            scalars["loss_scale"] = opt_states["loss_scale"]["scale"]
        return merged(trainable, frozen), new, scalars, ~is_kept

    def _to_device(self, trees: dict[str, PyTree]) -> dict[str, PyTree]:
        """Moves trees to device memory, and unpads the arrays that were in host memory."""
        layouts = self.layouts
        return {k: layouts[k].unpad(x) if layouts else x for k, x in trees.items()}

    def _to_storage(self, trees: dict[str, PyTree]) -> dict[str, PyTree]:
        """Pads arrays that belong in host memory and moves them there; inverse of `_to_device`."""
        layouts = self.layouts
        return {k: layouts[k].pad(x, only_on_host=True) if layouts else x for k, x in trees.items()}

    def _updates(
        self,
        grads: PyTree,
        norms: dict[str, jax.Array],
        slots: dict[str, PyTree],
        weights: PyTree,
        loss: jax.Array,
    ) -> tuple[PyTree, dict[str, PyTree]]:
        """Returns the weight updates and the new slots, computed one layer at a time."""
        updates: dict[str, Any] = {}
        new_slots = {}
        for name, group in self.groups.by_name.items():
            limits = self.settings.limits_by_optimizer[group.optimizer_name]
            norm = norms[group.optimizer_name]
            clip = functools.partial(limits.clipped, grad_norm=norm)
            local = group.per_weight(clip, group.select(grads))
            update = functools.partial(updates_of, group.optimizer, loss=loss)
            group_updates, new_slots[name] = group.per_layer(update)(
                local, slots[name], group.select(weights)
            )
            updates = merged(updates, group_updates)
        return updates, new_slots

    def eval_params(
        self, params: PyTree, opt_states: dict[str, PyTree], *, use_ema: bool
    ) -> PyTree:
        """Returns the weights to evaluate and decode with.

        Args:
          params: All weights.
          opt_states: Optimizer states. Only the entries in `Learner.eval_opt_states` are required.
          use_ema: Whether to return the moving average. Otherwise, returns the averages for a
            schedule-free optimizer, or `params` for other optimizers.
        """
        read = self.settings.eval_opt_states(opt_states, use_ema=use_ema)
        if not read:
            return params
        _, frozen = self.groups.split(params)
        if use_ema:
            return merged(read["ema"], frozen)
        # A schedule-free optimizer computes its averages from slots and weights.
        for name, group in self.groups.by_name.items():
            averages = evaluation_params(read["slots"][name], group.select(params))
            frozen = merged(frozen, averages)
        return frozen


def moving_average(average: PyTree, params: PyTree, decay: float, num_updates: jax.Array) -> PyTree:
    """Returns the updated average: decay * average + (1 - decay) * params.

    As in Pax's `apply_ema_weights`, the average starts as a copy of the initial weights, and the
    decay in update n is at most (1 + n) / (10 + n), so that the initial weights fade out quickly.

    Args:
      average: Tree with the structure of `params`. Its dtypes are preserved.
      params: Weights before the update. As in Pax, the average lags by one update.
      decay: Decay in [0, 1).
      num_updates: Number of updates before this one.
    """
    limited = jnp.minimum(decay, (1.0 + num_updates) / (10.0 + num_updates))
    return jax.tree.map(
        lambda a, p: (a - (1.0 - limited) * (a - p)).astype(a.dtype), average, params
    )


def _update_if(
    is_kept: jax.Array, compute: Callable[[PyTree], PyTree], old: PyTree, *, use_cond: bool
) -> PyTree:
    """Returns `compute(old)` if `is_kept`, else `old`.

    Args:
      is_kept: Bool scalar that is False if the step is skipped.
      compute: Takes `old`, and returns a tree with the same structure.
      old: The tree before the update.
      use_cond: Whether to use `jax.lax.cond` instead of an element-wise select, which XLA fuses
        with the update. The cond is needed on CPU, where XLA would materialize both operands of the
        select. It is also needed for slots in host memory, because XLA (libtpu 0.0.51) would
        otherwise transfer them at the start of the step, while activations need the memory.
    """
    if use_cond:
        return jax.lax.cond(is_kept, compute, lambda old: old, old)
    return jax.tree.map(lambda new, old: jnp.where(is_kept, new, old), compute(old), old)
