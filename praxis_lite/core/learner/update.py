"""The update of a model's weights by a learner, and the steps that are skipped (NaN, infinity)."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from praxis_lite.core.learner.ema import moving_average
from praxis_lite.core.learner.gradients import global_norm
from praxis_lite.core.learner.optimizer_factories import rate_at
from praxis_lite.core.learner.optimizer_groups import matched_paths
from praxis_lite.core.learner.path_masks import collected_patterns
from praxis_lite.core.learner.schedule_free import evaluation_params
from praxis_lite.core.learner.weight_groups import WeightGroups, merged
from praxis_lite.core.learner.whole_tree_optimizers import updates_of
from praxis_lite.core.sharding.devices.axis_types import typed_as
from praxis_lite.core.sharding.mesh import compiled_platform
from praxis_lite.core.sharding.weight_spec import spec_items

__all__ = ("BoundLearner", "SCOPE")

PyTree = Any

SCOPE = "learner"  # In the names of the operations of an update.


@dataclasses.dataclass
class BoundLearner:
    """A learner bound to the weights of a model; made by `Learner.bind`.

    Attributes:
      learner: the Learner, for its settings.
      groups: the optimizer of each weight.
      weights_with_host_slots: paths of the weights whose slots are in the host's memory.
      layouts: if anything is there, the StateLayouts of the trained "params" and, by name, of
        opt_states; set by the partitioner.
    """

    learner: Any
    groups: WeightGroups
    weights_with_host_slots: frozenset[str] = frozenset()
    layouts: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def init(self, params: PyTree) -> dict[str, PyTree]:
        """Returns opt_states: counts of updates and skipped steps, and "slots" by group.

        If they are set, also "ema" (the average of the trained weights) and "loss_scale".

        Raises:
          ConfigError: a mask's pattern matches no weight.
        """
        learner = self.learner
        with collected_patterns() as patterns:
            slots = {
                name: group.per_layer(group.optimizer.init)(group.of(params))
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
            # A copy: an array that is in the state twice could not be donated.
            opt_states["ema"] = jax.tree.map(jnp.copy, self.groups.split(params)[0])
        if learner.loss_scale is not None:
            opt_states["loss_scale"] = learner.loss_scale.init()
        return opt_states

    @jax.named_scope(SCOPE)
    def update(
        self, grads: PyTree, opt_states: dict[str, PyTree], params: PyTree, loss: jax.Array
    ) -> tuple[PyTree, dict[str, PyTree], dict[str, jax.Array], jax.Array]:
        """Returns (params, opt_states, scalars, is_skipped) after a step.

        A step is skipped if its loss, gradient or rate is not finite, or its gradient too large: it
        changes neither parameters, slots nor average, and schedules do not advance. It is counted.

        Args:
          grads: float32, of the trained weights only.
          params: of all weights.

        Returns:
          The scalars are grad_norm (before clipping), learning_rate, learning_rate/NAME of each
          auxiliary optimizer, num_skipped_steps and num_skipped_in_a_row; and, if the learner has
          such a limit or scale, is_gradient_too_large (0 or 1) and loss_scale (of this step).
        """
        learner, groups = self.learner, self.groups
        trainable, frozen = groups.split(params)

        def on_device() -> PyTree:
            return groups.lay_out(self._fetched({"params": grads})["params"])

        for_norms = on_device()
        grad_norm = global_norm(for_norms)
        is_finite = jnp.isfinite(grad_norm) & jnp.isfinite(loss)
        norms = dict.fromkeys(learner.limits_by_optimizer, grad_norm)
        if learner.apply_separate_scaling:
            by_optimizer = groups.by_optimizer(for_norms)
            norms = {name: global_norm(local) for name, local in by_optimizer.items()}
        is_small = jnp.stack([learner.limits.keeps(norm) for norm in norms.values()]).all()
        num_updates = opt_states["num_updates"]
        rates = {"learning_rate": rate_at(learner.learning_rate, num_updates)}
        for aux in learner.auxiliary_optimizers:
            rates[f"learning_rate/{aux.name}"] = rate_at(aux.learning_rate, num_updates)
        is_kept = is_finite & is_small & jnp.isfinite(jnp.stack(list(rates.values()))).all()

        def made(kept: dict[str, PyTree]) -> dict[str, PyTree]:
            old = self._fetched(kept)
            weights = old["params"]
            # Gradients on the host are fetched again, not kept on the device since the norm.
            local = on_device() if self.layouts else for_norms
            updates, slots = self._updates(local, norms, old["slots"], weights, loss)
            new = {"slots": slots, "params": optax.apply_updates(weights, updates)}
            if learner.ema_decay:
                new["ema"] = moving_average(old["ema"], weights, learner.ema_decay, num_updates)
            # Some optimizers return slots of another dtype than their init made.
            return self._stored(jax.tree.map(lambda n, o: typed_as(n.astype(o.dtype), o), new, old))

        old = {name: opt_states[name] for name in ("slots", "ema") if name in opt_states}
        in_branch = compiled_platform() == "cpu" or bool(self.layouts)
        new = _kept_if(is_kept, made, old | {"params": trainable}, in_branch=in_branch)
        trainable = groups.lay_out(new.pop("params"))
        new |= {
            "num_updates": num_updates + jnp.where(is_kept, 1, 0),
            "num_skipped_steps": opt_states["num_skipped_steps"] + jnp.where(is_kept, 0, 1),
            "num_skipped_in_a_row": jnp.where(is_kept, 0, opt_states["num_skipped_in_a_row"] + 1),
        }
        scalars = {
            "grad_norm": grad_norm,
            "num_skipped_steps": new["num_skipped_steps"],
            "num_skipped_in_a_row": new["num_skipped_in_a_row"], **rates,
        }
        if learner.limits.skip_step_gradient_norm_value:
            scalars["is_gradient_too_large"] = jnp.where(is_finite & ~is_small, 1.0, 0.0)
        if learner.loss_scale is not None:
            new["loss_scale"] = learner.loss_scale.update(opt_states["loss_scale"], is_finite)
            scalars["loss_scale"] = opt_states["loss_scale"]["scale"]
        return merged(trainable, frozen), new, scalars, ~is_kept

    def _fetched(self, trees: dict[str, PyTree]) -> dict[str, PyTree]:
        """Returns weights and opt_states on the device; those from the host without padding."""
        layouts = self.layouts
        return {k: layouts[k].unpad(x) if layouts else x for k, x in trees.items()}

    def _stored(self, trees: dict[str, PyTree]) -> dict[str, PyTree]:
        """Returns them in the memory that `_fetched` took them from, padded if on the host."""
        layouts = self.layouts
        return {
            k: layouts[k].pad(x, only_on_host=True) if layouts else x for k, x in trees.items()
        }

    def _updates(
        self, grads: PyTree, norms: dict[str, jax.Array], slots: dict[str, PyTree], weights: PyTree,
        loss: jax.Array,
    ) -> tuple[PyTree, dict[str, PyTree]]:
        """Returns the updates of the weights and the new slots, one layer of a stack at a time."""
        updates: dict[str, Any] = {}
        new_slots = {}
        for name, group in self.groups.by_name.items():
            limits = self.learner.limits_by_optimizer[group.optimizer_name]
            norm = norms[group.optimizer_name]
            clipped = functools.partial(limits.clipped, grad_norm=norm)
            local = group.per_weight(clipped, group.of(grads))
            update = functools.partial(updates_of, group.optimizer, loss=loss)
            group_updates, new_slots[name] = group.per_layer(update)(
                local, slots[name], group.of(weights)
            )
            updates = merged(updates, group_updates)
        return updates, new_slots

    def eval_params(
        self, params: PyTree, opt_states: dict[str, PyTree], *, use_ema: bool
    ) -> PyTree:
        """Returns the weights to evaluate and decode with.

        With `use_ema` the moving average; otherwise the averages of a schedule-free optimizer, or
        `params`. Of opt_states only `Learner.eval_opt_states` is read.
        """
        read = self.learner.eval_opt_states(opt_states, use_ema=use_ema)
        if not read:
            return params
        _, frozen = self.groups.split(params)
        if use_ema:
            return merged(read["ema"], frozen)
        for name, group in self.groups.by_name.items():
            frozen = merged(frozen, evaluation_params(read["slots"][name], group.of(params)))
        return frozen


def _kept_if(
    is_kept: jax.Array, made: Callable[[PyTree], PyTree], old: PyTree, *, in_branch: bool
) -> PyTree:
    """Returns `made(old)` if `is_kept`, else `old`.

    Args:
      in_branch: True: by `jax.lax.cond`. Needed on CPU, where XLA would write out both operands of
        an element-wise choice, and with slots on the host, which XLA (libtpu 0.0.51) would
        otherwise fetch at the start of the step, into the memory of activations. False: by an
        element-wise choice, which XLA fuses with the update.
    """
    if in_branch:
        return jax.lax.cond(is_kept, made, lambda old: old, old)
    return jax.tree.map(lambda new, old: jnp.where(is_kept, new, old), made(old), old)
