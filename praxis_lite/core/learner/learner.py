"""Learner: optimizers, gradient limits, averages and other settings for training weights."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax

from praxis_lite.core.callables import function_name
from praxis_lite.core.errors import ConfigError, is_positive_int, require
from praxis_lite.core.learner.gradient_limits import GradientLimits, limits_by_optimizer
from praxis_lite.core.learner.optimizer_factories import (
    OptimizerFactory,
    Schedule,
    build_optimizer,
    checked_rate,
)
from praxis_lite.core.learner.optimizer_groups import (
    AuxiliaryOptimizer,
    check_choices,
    matched_paths,
    optimizer_names,
)
from praxis_lite.core.learner.path_masks import compiled_patterns
from praxis_lite.core.learner.schedule_free import has_averages
from praxis_lite.core.learner.slots import extended_specs
from praxis_lite.core.learner.update import BoundLearner
from praxis_lite.core.learner.weight_groups import WeightGroups, grouped
from praxis_lite.core.learner.whole_tree_optimizers import couples_weights
from praxis_lite.core.sharding.weight_spec import spec_items, with_declared_weights

PyTree = Any
Patterns = str | Sequence[str]


class LossScale(Protocol):
    """A factor for the loss that adapts during training; its state is part of opt_states."""

    def init(self) -> dict[str, jax.Array]:
        """Returns the initial state, whose entry "scale" is the factor."""

    def update(self, state: dict[str, jax.Array], is_finite: jax.Array) -> dict[str, jax.Array]:
        """Returns the state after a step; `is_finite` is True if the gradients were finite."""


class WeightNoise(Protocol):
    """Noise that is added to weights before gradients are computed."""

    def apply(self, params: PyTree, key: jax.Array, step: jax.Array) -> PyTree:
        """Returns `params` with the noise for a step added."""


class Learner:
    """Settings for training weights; `bind` applies them to the weights of a model.

    Patterns are matched against paths of weights under params, such as
    `softmax/logits_ffn/linear/w`. Stacked weights are updated one layer at a time, so that
    optimizers that use complete tensors, such as Adafactor or LAMB, treat a stack like separate
    layers. Optimizers whose update for a weight depends on other weights or on random numbers are
    called once, with a separate leaf per layer (`whole_tree_optimizers`).

    Args:
      optimizer: Takes `learning_rate` and returns an optax transformation, such as
        `fdl.Partial(optax.adamw, b2=0.98)`.
      learning_rate: A number, or a schedule that maps the number of updates to a rate.
      auxiliary_optimizers: Optimizers and learning rates for the weights that match each
        optimizer's pattern. Other weights use `optimizer`.
      apply_separate_scaling: Whether to compute gradient norms, for clipping and for skipping
        steps, separately for each optimizer, and to use the limits of auxiliary optimizers.
        Otherwise, the global norm of all gradients is used.
      vectorize_on_repeat_prefix: Whether stacked weights are updated one layer at a time. If False,
        optimizers and clip_gradient_single_norm_to_value treat a stack as one array.
      bprop_variable_exclusion: One or more patterns of weights to freeze, which must match complete
        paths (`re.fullmatch`, as in Pax). Frozen weights have no gradients, slots or averages.
      bprop_variable_inclusion: One or more patterns of weights to train, which must match complete
        paths. All other weights are frozen.
      clip_gradient_norm_to_value: See `GradientLimits`. Disabled if 0.
      clip_gradient_single_norm_to_value: See `GradientLimits`. Disabled if 0.
      clip_gradient_to_value: See `GradientLimits`. Disabled if 0.
      skip_step_gradient_norm_value: See `GradientLimits`. Disabled if 0.
      ema_decay: Decay of the moving average (EMA) of the trained weights, or 0 for no average.
      gradient_accumulation_steps: Number of microbatches that each batch is split into.
      loss_scale: A DynamicLossScale for float16. If None, the loss is not scaled.
      variational_noise: A VariationalNoise, which is added to weights before gradients are
        computed, or None.
      slot_mesh_axes: Additional mesh axes that slots are split over (ZeRO-1).
      stacked_slot_mesh_axes: Mesh axes that split the slots of stacked layers by layer, instead of
        the dims that they split in the weights. An optimizer that multiplies matrices, such as
        Muon, then computes the update of a layer on the devices that have this layer's slots,
        instead of gathering the matrices of all layers on every device. A stack with fewer layers
        than devices along these axes is split like its weights, with a warning.
      host_slots: One or more patterns of weights, which must match complete paths. The slots and
        averages of these weights are stored in host memory, and moved to the device only during
        updates.

    Raises:
      ConfigError: A setting is out of range, or two settings cannot be combined.
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
        loss_scale: LossScale | None = None,
        variational_noise: WeightNoise | None = None,
        slot_mesh_axes: Sequence[str] = (),
        stacked_slot_mesh_axes: Sequence[str] = (),
        host_slots: Patterns = (),
    ):
        self.limits = GradientLimits(
            clip_gradient_norm_to_value,
            clip_gradient_single_norm_to_value,
            clip_gradient_to_value,
            skip_step_gradient_norm_value,
        )
        self.auxiliary_optimizers = tuple(auxiliary_optimizers)
        self.limits_by_optimizer = limits_by_optimizer(
            self.limits, self.auxiliary_optimizers, apply_separate_scaling
        )
        self.apply_separate_scaling = apply_separate_scaling
        self.vectorize_on_repeat_prefix = vectorize_on_repeat_prefix
        exclusion = _patterns(bprop_variable_exclusion)
        inclusion = _patterns(bprop_variable_inclusion)
        check_choices(self.auxiliary_optimizers, exclusion, inclusion)
        self.host_slots = _patterns(host_slots)
        compiled_patterns("Learner.host_slots", self.host_slots)
        self._optimizer_names = functools.partial(
            optimizer_names,
            auxiliary=self.auxiliary_optimizers,
            exclusion=exclusion,
            inclusion=inclusion,
        )
        require(
            0 <= ema_decay < 1,
            "Learner.ema_decay",
            ema_decay,
            "a number in [0, 1), where 0 disables the average",
        )
        steps = gradient_accumulation_steps
        setting = "Learner.gradient_accumulation_steps"
        require(is_positive_int(steps), setting, steps, "a positive integer")
        for name, axes in (
            ("slot_mesh_axes", slot_mesh_axes),
            ("stacked_slot_mesh_axes", stacked_slot_mesh_axes),
        ):
            expected = f"a sequence of mesh axes, such as ({axes!r},)"
            require(not isinstance(axes, str), f"Learner.{name}", axes, expected)
        self.ema_decay = ema_decay
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.loss_scale, self.variational_noise = loss_scale, variational_noise
        self.slot_mesh_axes = tuple(slot_mesh_axes)
        self.stacked_slot_mesh_axes = tuple(stacked_slot_mesh_axes)
        self.learning_rate = checked_rate("Learner.learning_rate", learning_rate)
        self._optimizer_name = function_name(optimizer).rpartition(".")[2]
        self.optimizer = build_optimizer(optimizer, learning_rate, "Learner")
        # The main optimizer has no name.
        self._optimizers = {"": self.optimizer} | {
            aux.name: build_optimizer(
                aux.optimizer, aux.learning_rate, f"AuxiliaryOptimizer '{aux.name}'"
            )
            for aux in self.auxiliary_optimizers
        }

    def __repr__(self) -> str:
        rate = self.learning_rate
        rate_text = function_name(rate).rpartition(".")[2] if callable(rate) else f"{rate:g}"
        others = "".join(f", {aux.name}" for aux in self.auxiliary_optimizers)
        return f"Learner({self._optimizer_name}{others}, learning_rate={rate_text})"

    def bind(
        self, weight_specs: PyTree, axis_sizes: Mapping[str, int] | None = None
    ) -> BoundLearner:
        """Returns a BoundLearner, which creates and updates the slots for a model's weights.

        Args:
          weight_specs: Nested dict of WeightSpec.
          axis_sizes: Number of devices along each mesh axis, in the mesh's order, or None without a
            mesh.

        Raises:
          ConfigError: Patterns are invalid (see `optimizer_names`), `host_slots` match no weight,
            or the axes for slots do not fit the mesh.
        """
        items = {"/".join(path): (path, spec) for path, spec in spec_items(weight_specs)}
        names = self._optimizer_names(list(items))
        whole_tree = []
        # Some optimizers look up what a weight's layer declares, such as the dims of a matrix.
        declared = {path: spec for path, (_, spec) in items.items()}
        optimizers = {
            name: type(optimizer)(
                *(with_declared_weights(function, declared) for function in optimizer)
            )
            for name, optimizer in self._optimizers.items()
        }
        # Optimizers whose updates couple weights receive all of their weights in one tree.
        for name, optimizer in optimizers.items():
            local = dict(
                items[path] for path, optimizer_name in names.items() if optimizer_name == name
            )
            owner = f"AuxiliaryOptimizer '{name}'" if name else "Learner"
            if local and couples_weights(optimizer, local, owner):
                whole_tree.append(name)
        by_name = grouped(
            weight_specs,
            names,
            optimizers,
            by_stack=self.vectorize_on_repeat_prefix,
            whole_tree=whole_tree,
        )
        # By default, slots are sharded like their weights.
        specs = None
        declares_slots = any(spec.slot_axes is not None for spec in declared.values())
        moves_slots = self.slot_mesh_axes or self.stacked_slot_mesh_axes or declares_slots
        if moves_slots and axis_sizes is not None:
            specs = extended_specs(
                weight_specs, self.slot_mesh_axes, axis_sizes, self.stacked_slot_mesh_axes
            )
        matched = matched_paths(list(items), self.host_slots, "Learner.host_slots", fullmatch=True)
        on_host = frozenset(matched & names.keys())
        return BoundLearner(self, WeightGroups(weight_specs, by_name, specs), on_host)

    def eval_opt_states(self, opt_states: dict[str, PyTree], use_ema: bool) -> dict[str, PyTree]:
        """Returns the entries of `opt_states` that `BoundLearner.eval_params` requires, if any.

        Raises:
          ConfigError: `use_ema` is set, but `ema_decay` is 0.
        """
        if use_ema and not self.ema_decay:
            raise ConfigError(
                "The moving average of the weights (EMA) was requested, but the state contains no "
                "average, because Learner.ema_decay is 0. Train with ema_decay set, for example to "
                "0.999."
            )
        if use_ema:
            return {"ema": opt_states["ema"]}
        return {"slots": opt_states["slots"]} if has_averages(opt_states["slots"]) else {}


def _patterns(patterns: Patterns) -> tuple[str, ...]:
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)
