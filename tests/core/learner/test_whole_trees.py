"""Optimizers that look beyond one weight train a stack as plain optax trains an unrolled model."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from praxis_lite import ConfigError
from praxis_lite.core import AuxiliaryOptimizer, Learner, WeightSpec
from praxis_lite.optimizers import path_mask
from praxis_lite.trainer.layout_table import optimizer_report
from tests.support.every_case import assert_each
from tests.support.marks import slow_but

F32 = jnp.dtype("float32")
SPECS = {
    "blocks": {"w": WeightSpec((3, 5, 7), F32, None, (None,))},
    "deep": {"b": WeightSpec((2, 3, 5), F32, None, (None, None))},
    "logits": {"b": WeightSpec((7,), F32), "w": WeightSpec((7, 2), F32)},
}
QUICK = ("clip_by_global_norm, then lamb", "adamw")
# Slots of other shapes than weights, of masked weights, of a history; rates that are slots.
TRAINED = (
    *QUICK,
    "momo",
    "mechanize",
    "lbfgs without a search",
    "a rate that is injected",
    "a clip of masked weights",
    "reduce_on_plateau",
)


def chain(*parts):
    return lambda learning_rate: optax.chain(*parts, optax.sgd(learning_rate))


def clip(learning_rate, optimizer=optax.adam):
    return optax.chain(optax.clip_by_global_norm(0.3), optimizer(learning_rate))


# Those that see all weights, and those that need not.
WHOLE = {
    "clip_by_global_norm": clip,
    "clip_by_global_norm, then lamb": functools.partial(clip, optimizer=optax.lamb),
    "normalize_by_update_norm": chain(optax.normalize_by_update_norm()),
    "apply_if_finite": lambda learning_rate: optax.apply_if_finite(optax.adam(learning_rate), 3),
    "dowg": chain(contrib.dowg()),
    "dog": chain(contrib.dog()),
    "prodigy": functools.partial(contrib.prodigy, estim_lr0=1e-3),
    "dadapt_adamw": functools.partial(contrib.dadapt_adamw, estim_lr0=1e-3),
    "mechanize": lambda learning_rate: contrib.mechanize(optax.adam(learning_rate), s_init=1e-3),
    "lbfgs without a search": lambda learning_rate: optax.lbfgs(learning_rate, linesearch=None),
    "polyak_sgd": lambda learning_rate: optax.polyak_sgd(learning_rate),
    "momo": lambda learning_rate: contrib.momo(learning_rate),
    "momo_adam": lambda learning_rate: contrib.momo_adam(learning_rate),
    "a rate that is injected": lambda learning_rate: optax.inject_hyperparams(
        lambda learning_rate: clip(learning_rate)
    )(learning_rate=learning_rate),
    "a clip of masked weights": lambda learning_rate: optax.chain(
        optax.masked(optax.clip_by_global_norm(0.3), path_mask(include=("blocks/w$", "deep/.*b$"))),
        optax.sgd(learning_rate),
    ),
}
LAYERWISE = {
    "adamw": optax.adamw,
    "lamb": optax.lamb,
    "lars": optax.lars,
    "adafactor": optax.adafactor,
    "lion": optax.lion,
    "muon": contrib.muon,
    "schedule_free": contrib.schedule_free_adamw,
    "clip_by_block_rms": chain(optax.clip_by_block_rms(0.1)),
    "adaptive_grad_clip": chain(optax.adaptive_grad_clip(0.1)),
    "centralize": chain(optax.centralize()),
    "zero_nans": chain(optax.zero_nans()),
    "reduce_on_plateau": lambda learning_rate: optax.chain(
        optax.sgd(learning_rate), contrib.reduce_on_plateau(factor=0.5, patience=1, rtol=0.5)
    ),
    "lookahead of the learner's kind": lambda learning_rate: optax.chain(
        optax.ema(0.9), optax.sgd(learning_rate)
    ),
}


def tree(seed):
    chance = np.random.default_rng(seed)
    return jax.tree.map(
        lambda spec: jnp.asarray(chance.normal(size=spec.shape), F32),
        SPECS,
        is_leaf=lambda node: isinstance(node, WeightSpec),
    )


def unrolled(tree):
    """Returns the tree as a model without stacks would have it."""
    return {
        "blocks": {"w": {str(i): tree["blocks"]["w"][i] for i in range(3)}},
        "deep": {"b": {f"{i}{j}": tree["deep"]["b"][i, j] for i in range(2) for j in range(3)}},
        "logits": tree["logits"],
    }


def losses():
    return [jnp.float32(loss) for loss in (3.0, 2.9, 2.95, 2.93)]


def by_the_learner(learner):
    params = tree(1)
    bound = learner.bind(SPECS)
    state = bound.init(params)

    @jax.jit
    def step(params, state, grads, loss):
        return bound.update(bound.groups.split(grads)[0], state, params, loss)[:2]

    for seed, loss in enumerate(losses()):
        params, state = step(params, state, tree(10 + seed), loss)
    return unrolled(params), bound.groups


def by_optax(make):
    params = unrolled(tree(1))
    optimizer = optax.with_extra_args_support(make(learning_rate=0.1))
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, grads, loss):
        updates, state = optimizer.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state

    for seed, loss in enumerate(losses()):
        params, state = step(params, state, unrolled(tree(10 + seed)), loss)
    return params


@pytest.mark.parametrize("name", slow_but(QUICK, TRAINED))
def test_a_stack_is_trained_as_optax_trains_its_layers(name):
    make = (WHOLE | LAYERWISE)[name]
    if name == "a clip of masked weights":
        # By optax' own mask of the unrolled model.
        def expected_make(learning_rate):
            mask = {"blocks": True, "deep": True, "logits": False}
            return optax.chain(
                optax.masked(optax.clip_by_global_norm(0.3), mask), optax.sgd(learning_rate)
            )
    else:
        expected_make = make
    actual, groups = by_the_learner(Learner(make, 0.1))
    expected = by_optax(expected_make)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
    if name in WHOLE:
        report = optimizer_report(groups)
        assert any("called with all its weights together" in line for line in report)
    else:
        assert "whole" not in groups.by_name


@pytest.mark.slow
def test_it_is_seen_which_optimizers_look_beyond_a_weight():
    def check(make):
        is_whole = list(Learner(make, 0.1).bind(SPECS).groups.by_name) == ["whole"]
        assert is_whole == (make in WHOLE.values())

    assert_each(check, (WHOLE | LAYERWISE).items())


def test_each_layer_has_noise_of_its_own():
    def make(learning_rate):
        return optax.noisy_sgd(learning_rate, eta=1.0, key=1)

    learner = Learner(make, 0.1)
    zero = jax.tree.map(jnp.zeros_like, tree(1))
    bound = learner.bind(SPECS)
    state = bound.init(zero)
    moved, *_ = jax.jit(bound.update)(zero, state, zero, jnp.float32(1.0))
    noises = [np.ravel(x) for x in jax.tree.leaves(unrolled(moved))]
    values = np.concatenate(noises)
    assert len(np.unique(values)) == len(values) and 0.02 < values.std() < 0.2


def test_limits_of_single_weights_are_of_each_layer_there_too():
    learner = Learner(clip, 0.1, clip_gradient_single_norm_to_value=0.2)
    actual, _ = by_the_learner(learner)

    def single(learning_rate):
        def clipped(grads, state, params=None):
            return jax.tree.map(
                lambda g: g * jnp.minimum(1.0, 0.2 / jnp.linalg.norm(g.ravel())), grads
            ), state

        per_weight = optax.GradientTransformation(lambda params: optax.EmptyState(), clipped)
        return optax.chain(per_weight, clip(learning_rate))

    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(by_optax(single)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def test_each_auxiliary_optimizer_sees_all_of_its_own_weights():
    aux = AuxiliaryOptimizer("(blocks|deep)/.*", clip, 0.1, "matrices")
    groups = Learner(optax.adam, 0.1, auxiliary_optimizers=[aux]).bind(SPECS).groups
    assert {name: len(group.paths) for name, group in groups.by_name.items()} == {
        "unstacked": 2,
        "matrices.whole": 2,
    }


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (optax.lbfgs, "value_fn|grad"),
        (chain(optax.scale_by_backtracking_linesearch(5)), "by_backtracking.*value_fn"),
        (chain(optax.scale_by_zoom_linesearch(5)), "by_zoom.*value_fn"),
        (lambda learning_rate: contrib.sophia(learning_rate), "obj_fn"),
        (
            lambda learning_rate: contrib.sam(
                optax.sgd(learning_rate), optax.sgd(0.1), opaque_mode=True
            ),
            "grad_fn",
        ),
        (chain(contrib.differentially_private_aggregate(1.0, 1.0, 1)), "per_example_global_norm"),
    ],
)
def test_what_computes_the_loss_again_is_refused_by_name(make, words):
    with pytest.raises(ConfigError, match=words):
        Learner(make, 0.1).bind(SPECS)
