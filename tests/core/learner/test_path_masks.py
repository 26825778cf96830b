"""Which weights a mask has in it, and how optax's optimizers use one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from praxis_lite import ConfigError
from praxis_lite.core import Learner, WeightSpec
from praxis_lite.optimizers import adafactor, collected_patterns, path_mask, regularized

WEIGHTS = {
    "dense": {"b": np.ones(3, np.float32), "w": np.ones((2, 3), np.float32)},
    "norm": {"scale": np.ones(3, np.float32)},
    "scale": np.ones((), np.float32),
}


def names_in(mask) -> list[str]:
    return [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, is_in in jax.tree_util.tree_leaves_with_path(mask(WEIGHTS))
        if is_in
    ]


@pytest.mark.parametrize(
    "settings, names",
    [
        ({}, ["dense/b", "dense/w", "norm/scale", "scale"]),
        ({"exclude": "norm"}, ["dense/b", "dense/w", "scale"]),
        # From the start, a part is enough.
        ({"exclude": "scale"}, ["dense/b", "dense/w", "norm/scale"]),
        ({"exclude": (".*scale", "dense/b")}, ["dense/w"]),
        ({"include": ("dense", "norm")}, ["dense/b", "dense/w", "norm/scale"]),
        ({"include": "dense", "exclude": ".*/b$"}, ["dense/w"]),
        ({"skip_1d_vectors": True}, ["dense/w"]),
        ({"include": "no such weight"}, []),
    ],
)
def test_weights_are_chosen_by_path_and_rank(settings, names):
    assert names_in(path_mask(**settings)) == names


def test_the_layers_of_a_stack_count_for_no_dim():
    specs = {
        name: WeightSpec((3, *shape), jnp.float32, None, (None,))
        for name, shape in {"b": (5,), "w": (2, 5)}.items()
    }
    params = {name: jnp.ones(spec.shape) for name, spec in specs.items()}
    adamw = functools.partial(optax.adamw, mask=path_mask(skip_1d_vectors=True), weight_decay=0.5)
    learner = Learner(adamw, 0.1)
    bound, zeros = learner.bind(specs), jax.tree.map(jnp.zeros_like, params)
    state = bound.init(params)
    params, *_ = bound.update(zeros, state, params, jnp.float32(1.0))
    np.testing.assert_array_equal(params["b"], np.ones((3, 5)))
    np.testing.assert_allclose(params["w"], np.full((3, 2, 5), 0.95), rtol=1e-6)


def test_patterns_are_collected_from_the_masks_that_are_used():
    used = functools.partial(
        regularized, optimizer=optax.sgd, l2_regularizer_weight=0.1, skip_lp_regularization="norn"
    )
    mask = path_mask(include="dense", exclude=(".*/b",))
    with collected_patterns() as patterns:
        jax.eval_shape(used(0.1).init, WEIGHTS)
        jax.eval_shape(optax.adamw(0.1, mask=mask).init, WEIGHTS)
        path_mask(exclude="of no optimizer")
        decayed = functools.partial(adafactor, decay_method="pow", decay_pow=0.8)
        jax.eval_shape(decayed(0.1, weight_decay={".*/w": 0.1}).init, WEIGHTS)
    assert patterns == {"norn", "dense", ".*/b", ".*/w"}
    optax.adamw(0.1, mask=path_mask(exclude="later")).init(WEIGHTS)
    assert "later" not in patterns


@pytest.mark.parametrize(
    ("pattern", "named"), [("(", r"'\('"), (("dense", "*"), r"'\*'"), (3, "3"), ((None,), "None")]
)
def test_what_is_no_pattern_is_named(pattern, named):
    with pytest.raises(ConfigError, match=f"mask.*{named}"):
        path_mask(exclude=pattern)
