"""Learners of ours from hyperparameters of Pax's, and what five steps of one make of weights."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from praxis_lite import optimizers
from praxis_lite.core import AuxiliaryOptimizer, Learner, WeightSpec
from praxis_lite.optimizers.schedules import linear_rampup_exponential_decay, scaled

Flat = dict[str, np.ndarray]

# Settings of every optimizer of Pax that are the learner's here.
OF_THE_LEARNER = (
    "clip_gradient_norm_to_value", "clip_gradient_single_norm_to_value", "ema_decay",
)  # fmt: skip
OF_REGULARIZED = (
    "l1_regularizer_weight", "l2_regularizer_weight", "decoupled_weight_decay",
    "skip_lp_1d_vectors",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Counterpart:
    """What stands for an optimizer class of Pax.

    Attributes:
      optimizer: called with a learning rate.
      names: our name of a setting, by Pax's where it is another.
      defaults: Pax's defaults, by our name, where ours is another.
      without: Pax's settings that there are not here.
    """

    optimizer: Callable[..., optax.GradientTransformation]
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    without: Sequence[str] = ()


# Pax's class, and that of "Adam" with sharded_adam=False.
COUNTERPARTS = {
    "Adagrad": Counterpart(optax.adagrad, {"epsilon": "eps"}, {"eps": 1e-10}),
    "Adam": Counterpart(optimizers.adam, without=("maybe_inf_to_nan", "sharded_adam")),
    "Adam, optax": Counterpart(
        optax.adam,
        {"beta1": "b1", "beta2": "b2", "epsilon": "eps", "epsilon_root": "eps_root"},
        {"eps": 1e-6},
        # Pax has no use for the last two either, in this form.
        ("maybe_inf_to_nan", "sharded_adam", "clip_threshold", "weight_decay"),
    ),
    "Lamb": Counterpart(optax.lamb),
    "Lars": Counterpart(optax.lars),
    "Lion": Counterpart(optimizers.lion),
    "Sgd": Counterpart(optax.sgd),
    "ShardedAdagrad": Counterpart(
        optax.adagrad, {"epsilon": "eps"}, {"eps": 1e-12, "initial_accumulator_value": 1e-12}
    ),
    "ShardedSgd": Counterpart(optax.sgd),
}


def pax_optimizer(settings: Mapping[str, Any]) -> Callable[..., optax.GradientTransformation]:
    """Returns our optimizer for the settings of one of Pax's; norms are left unregularized."""
    name = settings["class"] if settings.get("sharded_adam", True) else "Adam, optax"
    ours = COUNTERPARTS[name]
    ignored = {"class", "learning_rate", "lr_schedule", *OF_THE_LEARNER, *OF_REGULARIZED}
    local = {
        ours.names.get(name, name): value
        for name, value in settings.items()
        if name not in ignored and name not in ours.without
    }
    optimizer = functools.partial(ours.optimizer, **{**ours.defaults, **local})
    regularization = {name: settings[name] for name in OF_REGULARIZED if name in settings}
    if not regularization:
        return optimizer
    return functools.partial(
        optimizers.regularized,
        optimizer=optimizer,
        skip_lp_regularization=("norm",),
        **regularization,
    )


def pax_rate(settings: Mapping[str, Any]) -> Callable[[jax.Array], jax.Array]:
    schedule = {"warmup_steps": 2, "decay_start": 3, "decay_end": 8, "min_ratio": 0.1, "max": 1.0}
    schedule |= settings.get("lr_schedule", {})
    assert schedule.pop("class", "LinearRampupExponentialDecay") == "LinearRampupExponentialDecay"
    return scaled(settings.get("learning_rate", 0.1), linear_rampup_exponential_decay(**schedule))


def pax_learner(hparams: Mapping[str, Any]) -> Learner:
    """Returns our learner for the hyperparameters of one of Pax's."""
    optimizer = hparams["optimizer"]
    auxiliary = [
        AuxiliaryOptimizer(regex.removeprefix("params/"), pax_optimizer(aux), pax_rate(aux), name)
        for aux, regex, name in zip(
            hparams.get("auxiliary_optimizers", ()),
            hparams.get("auxiliary_regex", ()),
            hparams.get("auxiliary_names", ()),
            strict=True,
        )
    ]
    return Learner(
        pax_optimizer(optimizer),
        pax_rate(optimizer),
        auxiliary_optimizers=auxiliary,
        skip_step_gradient_norm_value=hparams.get("skip_step_gradient_norm_value", 0.0),
        **{name: optimizer[name] for name in OF_THE_LEARNER if name in optimizer},
    )


@dataclasses.dataclass(frozen=True)
class Run:
    """Weights by path, and learning rates, with the steps in front; the last step's slots."""

    weights: Flat
    learning_rates: np.ndarray
    opt_states: Any

    @functools.cached_property
    def slots(self) -> dict[str, Flat]:
        """The slots of each weight by its path, by the slot's name: m, v, trace, ema ..."""
        slots: dict[str, Flat] = {}
        for path, slot in jax.tree_util.tree_leaves_with_path(self.opt_states):
            fields = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
            keys = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
            if keys[0] == "slots" and fields[-1] != "count":
                slots.setdefault(fields[-1], {})["/".join(keys[2:])] = slot  # [1] is the group.
            elif keys[0] == "ema":
                slots.setdefault("ema", {})["/".join(keys[1:])] = slot
        return slots

    @property
    def counts(self) -> set[int]:
        """What the optimizers' counts of updates are: one value, where they agree."""
        return {
            int(count)
            for path, leaf in jax.tree_util.tree_leaves_with_path(self.opt_states["slots"])
            if getattr(path[-1], "name", "") == "count"
            for count in np.ravel(leaf)
        }


@jax.disable_jit()
def run(
    learner: Learner, weights: Flat, grads: Sequence[Flat], *, stacked=(), dtype=jnp.float32
) -> Run:
    """Returns a run of a learner: a step per gradient.

    Not jitted, nor the learner's condition: an operation is compiled once for all cases, which
    makes them many times as fast.

    Args:
      weights: arrays by path.
      grads: of each step, as weights; computed with in `dtype` too.
      stacked: the first parts of the paths whose weights have a leading dim of layers.
    """
    specs = nested(
        {
            path: WeightSpec(array.shape, dtype, None, (None,) * (path.split("/")[0] in stacked))
            for path, array in weights.items()
        }
    )
    params = nested({path: jnp.asarray(array, dtype) for path, array in weights.items()})
    bound = learner.bind(specs)
    opt_states = bound.init(params)
    types = jax.eval_shape(lambda tree: tree, (params, opt_states))
    history, rates = [], []
    for grad in grads:
        grad = nested({path: jnp.asarray(array, dtype) for path, array in grad.items()})
        params, opt_states, scalars, _ = bound.update(grad, opt_states, params, jnp.float32(1.0))
        assert jax.eval_shape(lambda tree: tree, (params, opt_states)) == types
        history.append(flat(params))
        rates.append(scalars["learning_rate"])
    return Run(jax.tree.map(lambda *w: np.stack(w), *history), np.stack(rates), opt_states)


def nested(arrays: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, array in arrays.items():
        *parents, last = path.split("/")
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = array
    return tree


def flat(tree: Any) -> Flat:
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def assert_within(actual: Any, expected: Any, name: str, *, atol, rtol, atol_of_max=0.0) -> None:
    """Checks |found - wanted| against the tolerance that the goldens state."""
    actual, expected = np.asarray(actual, np.float32), np.asarray(expected, np.float32)
    assert actual.shape == expected.shape, name
    largest = np.abs(expected).max(initial=0.0)
    np.testing.assert_allclose(
        actual, expected, rtol=rtol, atol=atol + atol_of_max * largest, err_msg=name
    )
