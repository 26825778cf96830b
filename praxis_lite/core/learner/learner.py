"""Settings of how weights are trained: optimizers, limits, averages, frozen weights."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax

from praxis_lite.core.errors import ConfigError, is_whole, require
from praxis_lite.core.learner.gradients import GradientLimits, limits_by_optimizer
from praxis_lite.core.learner.optimizer_factories import (
    OptimizerFactory,
    Schedule,
    checked_rate,
    made,
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
from praxis_lite.core.learner.whole_tree_optimizers import looks_beyond
from praxis_lite.core.sharding.weight_spec import knows_weights, spec_items

PyTree = Any
Patterns = str | Sequence[str]


class LossScale(Protocol):
    """A factor of the loss, and its state among the opt_states."""

    def init(self) -> dict[str, jax.Array]:
        """Returns the state of the first step; "scale" in it is the factor."""

    def update(self, state: dict[str, jax.Array], is_finite: jax.Array) -> dict[str, jax.Array]:
        """Returns the state after a step, whose gradients may not have been finite."""


class WeightNoise(Protocol):
    """Noise on the weights that gradients are taken at."""

    def apply(self, params: PyTree, key: jax.Array, step: jax.Array) -> PyTree:
        """Returns `params` with the noise of a step."""


class Learner:
    """Settings of training; `bind` makes of them the updates of a model's weights.

    Patterns are of weights' paths under params, such as `softmax/logits_ffn/linear/w`. A stack is
    updated one layer at a time, so an optimizer that looks at whole tensors, such as Adafactor or
    LAMB, trains it as it trains single layers. One that looks beyond one weight, or draws noise,
    sees all its weights at once, each layer by itself (`whole_trees`).

    Args:
      optimizer: called with `learning_rate`, returns the optax transformation; an
        `fdl.Partial(optax.adamw, b2=0.98)` for instance.
      learning_rate: a number, or a schedule of the number of updates made.
      auxiliary_optimizers: other optimizers and rates for the weights that match their patterns.
      apply_separate_scaling: clip, and skip steps, by the norm of each optimizer's gradients; an
        auxiliary one then has its own limits. False: by the norm of all gradients together.
      vectorize_on_repeat_prefix: False: an optimizer, and clip_gradient_single_norm_to_value, sees
        a whole stack as one array.
      bprop_variable_exclusion: a pattern of whole paths (`re.fullmatch`, as in Pax), or several,
        of weights that are frozen: they have no gradient, no slots and no average.
      bprop_variable_inclusion: such patterns of the weights to train; the rest is frozen.
      clip_gradient_norm_to_value, clip_gradient_single_norm_to_value, clip_gradient_to_value,
        skip_step_gradient_norm_value: see `GradientLimits`; 0: off.
      ema_decay: decay of the moving average (EMA) of the trained weights; 0: there is no average.
      gradient_accumulation_steps: the number of micro-batches that a step's batch is cut into.
      loss_scale: for float16, a DynamicLossScale; None: no scaling.
      variational_noise: a VariationalNoise, added to weights while gradients are computed; None: no
        noise.
      slot_mesh_axes: mesh axes that slots are split over, in addition to their weights' (ZeRO-1).
      host_slots: a pattern of complete paths, or several, of weights whose slots and averages are
        kept in the host's memory, and on the device only during an update; ".*": of all.

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
        loss_scale: LossScale | None = None,
        variational_noise: WeightNoise | None = None,
        slot_mesh_axes: Sequence[str] = (),
        host_slots: Patterns = (),
    ):
        self.limits = GradientLimits(
            clip_gradient_norm_to_value, clip_gradient_single_norm_to_value, clip_gradient_to_value,
            skip_step_gradient_norm_value,
        )
        self.auxiliary_optimizers = tuple(auxiliary_optimizers)
        self.limits_by_optimizer = limits_by_optimizer(
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
        self.host_slots = _patterns(host_slots)
        compiled_patterns("Learner.host_slots", self.host_slots)
        self._optimizer_names = functools.partial(optimizer_names, **choices)
        require(0 <= ema_decay < 1, "Learner.ema_decay", ema_decay, "a number of [0, 1), 0 for off")
        steps, axes = gradient_accumulation_steps, slot_mesh_axes
        setting = "Learner.gradient_accumulation_steps"
        require(is_whole(steps), setting, steps, "a positive integer")
        expected = f"a sequence of mesh axes, such as ({axes!r},)"
        require(not isinstance(axes, str), "Learner.slot_mesh_axes", axes, expected)
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

    def bind(
        self, weight_specs: PyTree, axis_sizes: Mapping[str, int] | None = None
    ) -> BoundLearner:
        """Returns the learner of a model's weights, which makes their slots and updates.

        Args:
          weight_specs: nested dict of WeightSpec.
          axis_sizes: devices along each mesh axis, in the mesh's order; None: there is no mesh.

        Raises:
          ConfigError: as `optimizer_names`, `host_slots` match no weight, or `slot_mesh_axes` do
            not fit the mesh.
        """
        items = {"/".join(path): (path, spec) for path, spec in spec_items(weight_specs)}
        names = self._optimizer_names(list(items))
        together = []
        declared = {path: spec for path, (_, spec) in items.items()}
        optimizers = {
            name: type(optimizer)(*(knows_weights(part, declared) for part in optimizer))
            for name, optimizer in self._optimizers.items()
        }
        for name, optimizer in optimizers.items():
            local = dict(items[path] for path, its_name in names.items() if its_name == name)
            owner = f"AuxiliaryOptimizer '{name}'" if name else "Learner"
            if local and looks_beyond(optimizer, local, owner):
                together.append(name)
        by_name = grouped(
            weight_specs, names, optimizers, by_stack=self.vectorize_on_repeat_prefix,
            together=together,
        )
        specs = None
        say_own = any(spec.slot_axes is not None for spec in declared.values())
        if (self.slot_mesh_axes or say_own) and axis_sizes is not None:
            specs = extended_specs(weight_specs, self.slot_mesh_axes, axis_sizes)
        on_host = matched_paths(list(items), self.host_slots, "Learner.host_slots", whole=True)
        on_host = frozenset(on_host & names.keys())
        return BoundLearner(self, WeightGroups(weight_specs, by_name, specs), on_host)

    def eval_opt_states(self, opt_states: dict[str, PyTree], use_ema: bool) -> dict[str, PyTree]:
        """Returns the part of `opt_states` that `BoundLearner.eval_params` reads; {}: none.

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


def _patterns(patterns: Patterns) -> tuple[str, ...]:
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)
