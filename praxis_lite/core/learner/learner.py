"""Updates of parameters: the trained weights, the optimizer of each, the skipped steps."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from praxis_lite.core.errors import ConfigError, require
from praxis_lite.core.learner.gradients import GradientLimits, global_norm, limits_by_optimizer
from praxis_lite.core.learner.loss_scaling import DynamicLossScale
from praxis_lite.core.learner.optimizer_factories import (
    OptimizerFactory,
    Schedule,
    checked_rate,
    made,
    rate_at,
)
from praxis_lite.core.learner.optimizer_groups import (
    AuxiliaryOptimizer,
    check_choices,
    check_mask_patterns,
    optimizer_names,
)
from praxis_lite.core.learner.path_masks import collected_patterns
from praxis_lite.core.learner.regularization import VariationalNoise
from praxis_lite.core.learner.schedule_free import evaluation_params, has_averages
from praxis_lite.core.learner.skipped_steps import kept_if
from praxis_lite.core.learner.slots import extended_specs
from praxis_lite.core.learner.weight_averages import moving_average
from praxis_lite.core.learner.weight_groups import WeightGroups, grouped, merged
from praxis_lite.core.learner.whole_trees import looks_beyond, updates_of
from praxis_lite.core.sharding.weight_spec import spec_items

PyTree = Any
Patterns = str | Sequence[str]


class Learner:
    """Returns updated parameters and slots for gradients.

    Patterns are of weights' paths under params, such as `softmax/logits_ffn/linear/w`. A stack is
    updated one layer at a time, so an optimizer that looks at whole tensors, such as Adafactor or
    LAMB, trains it as it trains single layers. One that looks beyond one weight, or draws noise,
    sees all its weights at once, each layer by itself (`whole_trees`).

    Args:
      optimizer: called with `learning_rate`, returns the optax transformation; an
        `fdl.Partial(optax.adamw, b2=0.98)` for instance.
      learning_rate: a number, or a schedule of the number of updates made.
      auxiliary_optimizers: other optimizers and rates for the weights that match their patterns.
      apply_separate_scaling: clip, and skip steps, by the norm of each optimizer's own gradients,
        which an auxiliary one clips by limits of its own. False: by that of all together.
      vectorize_on_repeat_prefix: False: an optimizer, and clip_gradient_single_norm_to_value, sees
        a whole stack as one array.
      bprop_variable_exclusion: a pattern of whole paths (`re.fullmatch`, as in Pax), or several,
        of weights that are frozen: they have no gradient, no slots and no average.
      bprop_variable_inclusion: such patterns of the weights to train; the rest is frozen.
      clip_gradient_norm_to_value, clip_gradient_single_norm_to_value, clip_gradient_to_value,
        skip_step_gradient_norm_value: see `GradientLimits`; 0: off.
      ema_decay: of an average of the trained weights that the state keeps; 0: there is no average.
      gradient_accumulation_steps: micro-batches that a step's batch is worked on in.
      loss_scale: for float16; None: no scaling.
      variational_noise: added to weights while gradients are taken; None: nothing.
      slot_mesh_axes: mesh axes that slots are split over besides those of their weights (ZeRO-1).

    Raises:
      ConfigError: a setting is out of range, or two of them exclude each other.
    """

    def __init__(
        self,
        optimizer: OptimizerFactory,
        learning_rate: float | Schedule,
        *,
        auxiliary_optimizers: Sequence[AuxiliaryOptimizer] = (),
        apply_separate_scaling: bool = False,
        vectorize_on_repeat_prefix: bool = True,
        bprop_variable_exclusion: Patterns = (),
        bprop_variable_inclusion: Patterns = (),
        clip_gradient_norm_to_value: float = 0.0,
        clip_gradient_single_norm_to_value: float = 0.0,
        clip_gradient_to_value: float = 0.0,
        skip_step_gradient_norm_value: float = 0.0,
        ema_decay: float = 0.0,
        gradient_accumulation_steps: int = 1,
        loss_scale: DynamicLossScale | None = None,
        variational_noise: VariationalNoise | None = None,
        slot_mesh_axes: Sequence[str] = (),
    ):
        self.limits = GradientLimits(
            clip_gradient_norm_to_value,
            clip_gradient_single_norm_to_value,
            clip_gradient_to_value,
            skip_step_gradient_norm_value,
        )
        self.auxiliary_optimizers = tuple(auxiliary_optimizers)
        self._limits = limits_by_optimizer(
            self.limits, self.auxiliary_optimizers, apply_separate_scaling
        )
        self.apply_separate_scaling = apply_separate_scaling
        self.vectorize_on_repeat_prefix = vectorize_on_repeat_prefix
        choices = {
            "auxiliary": self.auxiliary_optimizers,
            "exclusion": _patterns(bprop_variable_exclusion),
            "inclusion": _patterns(bprop_variable_inclusion),
        }
        check_choices(**choices)
        self._optimizer_names = functools.partial(optimizer_names, **choices)
        require(0 <= ema_decay < 1, "Learner.ema_decay", ema_decay, "a number of [0, 1), 0 for off")
        steps, axes = gradient_accumulation_steps, slot_mesh_axes
        require(
            isinstance(steps, int) and not isinstance(steps, bool) and steps > 0,
            "Learner.gradient_accumulation_steps", steps, "a positive integer",
        )
        wanted = f"a sequence of mesh axes, such as ({axes!r},)"
        require(not isinstance(axes, str), "Learner.slot_mesh_axes", axes, wanted)
        self.ema_decay = ema_decay
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.loss_scale, self.variational_noise = loss_scale, variational_noise
        self.slot_mesh_axes = tuple(slot_mesh_axes)
        self.learning_rate = checked_rate("Learner.learning_rate", learning_rate)
        self.optimizer = made(optimizer, learning_rate, "Learner")
        # The main optimizer has no name.
        self._optimizers = {"": self.optimizer} | {
            aux.name: made(aux.optimizer, aux.learning_rate, f"AuxiliaryOptimizer '{aux.name}'")
            for aux in self.auxiliary_optimizers
        }

    def groups(
        self, weight_specs: PyTree, axis_sizes: Mapping[str, int] | None = None
    ) -> WeightGroups:
        """Returns the groups of weights: the other methods' argument, made once.

        Args:
          weight_specs: nested dict of WeightSpec.
          axis_sizes: devices along each mesh axis, in the mesh's order; None: there is no mesh.

        Raises:
          ConfigError: as `optimizer_names`, or `slot_mesh_axes` does not fit the mesh.
        """
        items = {"/".join(path): (path, spec) for path, spec in spec_items(weight_specs)}
        names = self._optimizer_names(list(items))
        together = []
        for name, optimizer in self._optimizers.items():
            own = dict(items[path] for path, its_name in names.items() if its_name == name)
            owner = f"AuxiliaryOptimizer '{name}'" if name else "Learner"
            if own and looks_beyond(optimizer, own, owner):
                together.append(name)
        by_name = grouped(
            weight_specs, names, self._optimizers, by_stack=self.vectorize_on_repeat_prefix,
            together=together,
        )
        specs = None
        if self.slot_mesh_axes and axis_sizes is not None:
            specs = extended_specs(weight_specs, self.slot_mesh_axes, axis_sizes)
        return WeightGroups(weight_specs, by_name, specs)

    def init(self, params: PyTree, groups: WeightGroups) -> dict[str, PyTree]:
        """Returns opt_states: counts of updates and skipped steps, and "slots" by group.

        Where they are set, "ema" (the average of the trained weights) and "loss_scale" too.

        Raises:
          ConfigError: a mask's pattern matches no weight.
        """
        with collected_patterns() as patterns:
            slots = {
                name: group.per_layer(group.optimizer.init)(group.of(params))
                for name, group in groups.by_name.items()
            }
        paths = ["/".join(path) for path, _ in spec_items(groups.weight_specs)]
        check_mask_patterns(paths, patterns)
        opt_states: dict[str, PyTree] = {
            "num_updates": jnp.zeros((), jnp.int32),
            "num_skipped_steps": jnp.zeros((), jnp.int32),
            "num_skipped_in_a_row": jnp.zeros((), jnp.int32),
            "slots": slots,
        }
        if self.ema_decay:
            # A copy: an array that is in the state twice could not be donated.
            opt_states["ema"] = jax.tree.map(jnp.copy, groups.split(params)[0])
        if self.loss_scale is not None:
            opt_states["loss_scale"] = self.loss_scale.init()
        return opt_states

    @jax.named_scope("learner")
    def update(
        self, grads: PyTree, opt_states: dict[str, PyTree], params: PyTree, groups: WeightGroups,
        loss: jax.Array,
    ) -> tuple[PyTree, dict[str, PyTree], dict[str, jax.Array], jax.Array]:
        """Returns (params, opt_states, scalars, is_skipped) after a step.

        A step whose loss, gradient or rate is not finite, or whose gradient is too large, changes
        neither parameters, slots nor average, and is counted; schedules do not advance with it.

        Args:
          grads: float32, of the trained weights only.
          params: of all weights.

        Returns:
          The scalars are grad_norm (before clipping), learning_rate, learning_rate/NAME of each
          auxiliary optimizer, num_skipped_steps, num_skipped_in_a_row, and of what is set
          is_gradient_too_large (0 or 1) and loss_scale (the one this step was made with).
        """
        trainable, frozen = groups.split(params)
        grads = groups.lay_out(grads)
        grad_norm = global_norm(grads)
        is_finite = jnp.isfinite(grad_norm) & jnp.isfinite(loss)
        norms = dict.fromkeys(self._limits, grad_norm)
        if self.apply_separate_scaling:
            norms = {name: global_norm(own) for name, own in groups.by_optimizer(grads).items()}
        is_small = jnp.stack([self.limits.keeps(norm) for norm in norms.values()]).all()
        num_updates = opt_states["num_updates"]
        rates = {"learning_rate": rate_at(self.learning_rate, num_updates)}
        for aux in self.auxiliary_optimizers:
            rates[f"learning_rate/{aux.name}"] = rate_at(aux.learning_rate, num_updates)
        is_kept = is_finite & is_small & jnp.isfinite(jnp.stack(list(rates.values()))).all()

        def made(weights: PyTree, old: dict[str, PyTree]) -> tuple[PyTree, dict[str, PyTree]]:
            updates, slots = self._updates(grads, norms, old["slots"], weights, groups, loss)
            new = {"slots": slots}
            if self.ema_decay:
                new["ema"] = moving_average(old["ema"], weights, self.ema_decay, num_updates)
            new = optax.apply_updates(weights, updates), new
            # Some optimizers return slots of another dtype than their init made.
            return jax.tree.map(lambda n, o: n.astype(o.dtype), new, (weights, old))

        old = {name: opt_states[name] for name in ("slots", "ema") if name in opt_states}
        trainable, new = kept_if(is_kept, made, trainable, old)
        trainable = groups.lay_out(trainable)
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
        if self.limits.skip_step_gradient_norm_value:
            scalars["is_gradient_too_large"] = jnp.where(is_finite & ~is_small, 1.0, 0.0)
        if self.loss_scale is not None:
            new["loss_scale"] = self.loss_scale.update(opt_states["loss_scale"], is_finite)
            scalars["loss_scale"] = opt_states["loss_scale"]["scale"]
        return merged(trainable, frozen), new, scalars, ~is_kept

    def _updates(
        self, grads: PyTree, norms: dict[str, jax.Array], slots: dict[str, PyTree], weights: PyTree,
        groups: WeightGroups, loss: jax.Array,
    ) -> tuple[PyTree, dict[str, PyTree]]:
        """Returns the updates of the weights, and the new slots; a layer of a stack at a time."""
        updates: dict[str, Any] = {}
        new_slots = {}
        for name, group in groups.by_name.items():
            limits, norm = self._limits[group.optimizer_name], norms[group.optimizer_name]
            own = group.per_weight(functools.partial(_clipped, limits, norm), group.of(grads))
            update = functools.partial(_updated, group.optimizer, loss)
            group_updates, new_slots[name] = group.per_layer(update)(
                own, slots[name], group.of(weights)
            )
            updates = merged(updates, group_updates)
        return updates, new_slots

    def eval_opt_states(self, opt_states: dict[str, PyTree], use_ema: bool) -> dict[str, PyTree]:
        """Returns the part of `opt_states` that `eval_params` reads; {}: it returns `params`.

        Raises:
          ConfigError: `use_ema` without an `ema_decay`.
        """
        if use_ema and not self.ema_decay:
            raise ConfigError(
                "The average of the weights (EMA) is asked for, but Learner.ema_decay is 0, so "
                "the state has none. Set ema_decay, such as 0.999, and train with it."
            )
        if use_ema:
            return {"ema": opt_states["ema"]}
        return {"slots": opt_states["slots"]} if has_averages(opt_states["slots"]) else {}

    def eval_params(
        self, params: PyTree, opt_states: dict[str, PyTree], groups: WeightGroups, use_ema: bool
    ) -> PyTree:
        """Returns the weights to evaluate and decode with, of what `eval_opt_states` returns.

        With `use_ema` the moving average; else the averages of a schedule-free optimizer, or
        `params`.
        """
        read = self.eval_opt_states(opt_states, use_ema=use_ema)
        if not read:
            return params
        _, frozen = groups.split(params)
        if use_ema:
            return merged(read["ema"], frozen)
        for name, group in groups.by_name.items():
            frozen = merged(frozen, evaluation_params(read["slots"][name], group.of(params)))
        return frozen


def _clipped(limits: GradientLimits, norm: jax.Array, grads: PyTree) -> PyTree:
    return limits.clipped(grads, norm)


def _updated(
    optimizer: optax.GradientTransformation, loss: jax.Array, grads: PyTree, slots: PyTree,
    weights: PyTree,
) -> tuple[PyTree, PyTree]:
    return updates_of(optimizer, grads, slots, weights, loss)


def _patterns(patterns: Patterns) -> tuple[str, ...]:
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)
