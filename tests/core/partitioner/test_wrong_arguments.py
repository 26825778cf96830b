"""A Partitioner's calls with wrong arguments: a paragraph each, and nothing compiled or lost."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite import ConfigError
from praxis_lite.core import constrain
from praxis_lite.core.partitioner.arguments import checked_call
from tests.decode.toy_models import num_compiled
from tests.support.lm_runs import batches, partitioner_of

UNEVEN = ("uneven", "adamw", (1, 4, 2))


@functools.cache
def made(*run):
    """Returns a Partitioner with a state, a batch and a key."""
    # One of its own: tests of the shared one count its programs.
    partitioner = partitioner_of.__wrapped__(*run)
    key = partitioner.key(0)
    batch = partitioner.global_batch(batches(run[0])[0])
    return partitioner, partitioner.init(key), batch, key


def rows():
    return batches("uneven")[0]


def with_leaf(mdl_vars, name, value):
    """Returns mdl_vars with another softmax, under another name."""
    params = {key: x for key, x in mdl_vars["params"].items() if key != "softmax"}
    return {**mdl_vars, "params": params if name is None else {**params, name: value}}


def cast(tree, dtype):
    return jax.tree.map(lambda x: x.astype(dtype) if x.dtype == np.float32 else x, tree)


def without_padding(partitioner, mdl_vars):
    shapes = partitioner.layout.shapes.mdl_vars
    return jax.tree.map(lambda x, to: np.asarray(x)[tuple(map(slice, to.shape))], mdl_vars, shapes)


# By name: the call, of (partitioner, state, batch, key); and words of its message.
WRONG = {
    "dict for a state": (
        lambda p, s, b, k: p.train_step(s.mdl_vars, b, k),
        "train_step.*state.*params;.*TrainState",
    ),
    "fields for a state": (
        lambda p, s, b, k: p.train_step(dataclasses.asdict(s), b, k),
        "train_step.*step, mdl_vars, opt",
    ),
    "rows for a batch": (
        lambda p, s, b, k: p.train_step(s, rows(), k),
        "train_step.*batch.*ids, labels, weights;.*partitioner.global_batch",
    ),
    "number for a key": (lambda p, s, b, k: p.train_step(s, b, 3), r"Pass partitioner.key\(seed"),
    "no key": (lambda p, s, b, k: p.train_step(s, b, None), "train_step.*key.*None;"),
    "state for mdl_vars": (
        lambda p, s, b, k: p.eval_step(s, b),
        "eval_step.*mdl_vars.*TrainState;.*state.mdl_vars",
    ),
    "params for mdl_vars": (
        lambda p, s, b, k: p.eval_step(s.mdl_vars["params"], b),
        "params/final_ln/scale.*state.mdl_vars",
    ),
    "a leaf is missing": (
        lambda p, s, b, k: p.eval_step(with_leaf(s.mdl_vars, None, None), b),
        "lacks params/softmax/logits_ffn/linear/w. Pass",
    ),
    "a leaf is unknown": (
        lambda p, s, b, k: p.eval_step(
            with_leaf(s.mdl_vars, "sofmax", s.mdl_vars["params"]["softmax"]), b
        ),
        "params/sofmax/.*params/softmax",
    ),
    "a leaf is a list": (
        lambda p, s, b, k: p.eval_step(
            with_leaf(s.mdl_vars, "softmax", {"logits_ffn": {"linear": {"w": 1.5}}}), b
        ),
        r"linear/w (is 1.5; expected an array|has the shape \(\))",
    ),
    "another dtype": (
        lambda p, s, b, k: p.eval_step(cast(s.mdl_vars, jnp.bfloat16), b),
        "eval_step.*mdl_vars/params/.*'bfloat16'.*float32",
    ),
    "without padding": (
        lambda p, s, b, k: p.eval_step(without_padding(p, s.mdl_vars), b),
        r"eval_step.*/w .*\(13, 37\).*float32.*\(16, 38\)",
    ),
    "of another model": (
        lambda p, s, b, k: p.train_step(made("even", "adamw", (1, 4, 2))[1], b, k),
        r"final_ln/scale.*\(24,\);.*\(13,\)",
    ),
    "of other devices": (
        lambda p, s, b, k: p.train_step(made("uneven", "adamw", (1, 3, 2))[1], b, k),
        "train_step.*state/step.* 6 .* 8 ",
    ),
    "of another mesh": (
        lambda p, s, b, k: p.train_step(made("uneven", "adamw", (2, 2, 2))[1], b, k),
        r"state/step.*\{'replica': 2.*\{'replica': 1",
    ),
    "a batch without labels": (
        lambda p, s, b, k: p.eval_step(s.mdl_vars, p.global_batch({"ids": rows()["ids"]})),
        "'labels'.*eval_step",
    ),
    "ids that are no integers": (
        lambda p, s, b, k: p.eval_step(
            s.mdl_vars, p.global_batch({**rows(), "ids": rows()["ids"].astype(np.float32)})
        ),
        "ids.*float32.*int32",
    ),
    "an id beyond the model's": (
        lambda p, s, b, k: p.global_batch({**rows(), "ids": rows()["ids"] + 37}),
        "ids.*36.*vocab_size.*37",
    ),
    "lists for rows": (lambda p, s, b, k: p.global_batch({"ids": [[1, 2]]}), "ids.*list;"),
    "texts for rows": (lambda p, s, b, k: p.global_batch({"ids": np.array(["a"])}), "ids.*'<U1'"),
    "a batch for rows": (lambda p, s, b, k: p.global_batch(b), "^global_batch .*GlobalBatch"),
    "averages of a dict": (
        lambda p, s, b, k: p.eval_mdl_vars(s.mdl_vars, use_ema=True),
        "eval_mdl_vars.*state",
    ),
    "init by a number": (lambda p, s, b, k: p.init(3), "init.*key.*int32"),
    "a batch to lower for": (lambda p, s, b, k: p.train_step.trace(b), "^trace .*GlobalBatch"),
    "a list to check": (
        lambda p, s, b, k: p.train_step.check_batch([1]),
        "check_batch.*list.*NumPy",
    ),
    "state for a function's": (
        lambda p, s, b, k: jax.jit(p.with_mdl_vars(lambda m: m["params"]))(s),
        "with_mdl_vars.*mdl_vars.*TrainState",
    ),
    "another model's for a function": (
        lambda p, s, b, k: jax.jit(p.with_mdl_vars(lambda m: m))(
            made("even", "adamw", (1, 4, 2))[1].mdl_vars
        ),
        r"final_ln/scale.*\(24,\);.*\(13,\)",
    ),
}
QUICK = {"dict for a state", "rows for a batch", "an id beyond the model's", "a list to check"}


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in WRONG],
)
def test_a_wrong_argument_is_named_with_what_to_give(name):
    call, words = WRONG[name]
    run = made(*UNEVEN)
    before = num_compiled()
    with pytest.raises(ConfigError, match=words) as refused:
        call(*run)
    # What is made for the call, in some of them, are small programs.
    assert num_compiled() == before or name not in QUICK
    assert len(str(refused.value)) < 800
    assert not any(x.is_deleted() for x in jax.tree.leaves(run[1]))


@pytest.mark.slow
def test_a_state_that_was_donated_is_refused_and_ends_no_process():
    partitioner, _, batch, key = made(*UNEVEN)
    state = partitioner.init(key)
    partitioner.train_step(state, batch, key)
    for call in (
        lambda: partitioner.train_step(state, batch, key),
        lambda: partitioner.eval_step(state.mdl_vars, batch),
        lambda: partitioner.decode_step(state.mdl_vars, batch, key),
    ):
        with pytest.raises(ConfigError, match="(state|mdl_vars).*deleted"):
            call()


class Failing:
    """A compiled step that fails as it runs, its state donated."""

    def __init__(self, words):
        self.words = words

    def __call__(self, state, batch, key):
        state.delete()
        raise jax.errors.JaxRuntimeError(self.words)


def test_a_step_that_fails_as_it_runs_says_why_and_not_that_its_state_is_gone():
    def check(state, batch, key):
        raise ConfigError("the state is deleted")

    step = functools.partial(checked_call, Failing("RESOURCE_EXHAUSTED: Out of memory"), check)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        step(jnp.ones(3), None, None)
    step = functools.partial(checked_call, Failing("Buffer has been deleted or donated"), check)
    with pytest.raises(ConfigError, match="the state is deleted"):
        step(jnp.ones(3), None, None)


def softmax_of(mdl_vars):
    return mdl_vars["params"]["softmax"]["logits_ffn"]["linear"]["w"]


ROWS = np.arange(12 * 4 * 6, dtype=np.float32).reshape(12, 4, 6)
# XLA splits these dims over a part of an axis, or over axes in an order, that JAX has no name for.
FUNCTIONS = (
    lambda m, x, axes: (constrain(x, (axes, None, None)) * softmax_of(m).sum()).sum(),
    lambda m, x, axes: {
        "turned": constrain(x, (None, axes, None)).T * softmax_of(m).sum(),
        "sum": x.sum(),
        "pair": [constrain(x * softmax_of(m).sum(), (axes[::-1], None, None)), None],
    },
)


@pytest.mark.parametrize(
    "shape",
    [
        (1, 4, 2),
        pytest.param((1, 8, 1), marks=pytest.mark.slow),
        *(
            pytest.param(shape, marks=pytest.mark.nightly)
            for shape in ((1, 1, 8), (2, 2, 2), (1, 3, 2))
        ),
    ],
    ids=str,
)
def test_a_function_of_mdl_vars_has_arguments_and_results_of_any_size(shape):
    """A program for each: an argument of several functions gets a layout that JAX can represent."""
    partitioner, state, _, _ = made("uneven", "adamw", shape)
    axes = partitioner.mesh.axis_names
    mdl_vars = without_padding(partitioner, state.mdl_vars)
    for function, num_rows in itertools.product(FUNCTIONS, (1, 2, 6, 12)):
        x = ROWS[:num_rows]
        # On one device without a mesh, where constraints have no effect.
        expected = jax.jit(functools.partial(function, axes=axes))(mdl_vars, x)
        for order in (axes, axes[1:2], axes[::-1]):
            of_axes = functools.partial(function, axes=order)
            actual = jax.jit(partitioner.with_mdl_vars(of_axes))(state.mdl_vars, x)
            jax.tree.map(
                lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-3),
                actual,
                expected,
            )


@pytest.mark.slow
def test_it_is_differentiated_and_mapped():
    partitioner, state, _, _ = made("uneven", "adamw", (1, 8, 1))

    def loss(mdl_vars, x):
        return (constrain(x, (("data",), None)) @ softmax_of(mdl_vars)).sum()

    wrapped, x = partitioner.with_mdl_vars(loss), np.ones((4, 13), np.float32)
    by_weights = jax.jit(jax.grad(wrapped))(state.mdl_vars, x)
    expected = np.zeros((16, 37), np.float32)[: softmax_of(by_weights).shape[0]]
    expected[:13] = 4.0
    np.testing.assert_allclose(softmax_of(by_weights)[:, :37], expected)
    by_rows = jax.jit(jax.grad(wrapped, argnums=1))(state.mdl_vars, x)
    assert by_rows.shape == (4, 13)
    mapped = jax.jit(jax.vmap(wrapped, in_axes=(None, 0)))(state.mdl_vars, np.stack([x] * 3))
    np.testing.assert_allclose(mapped, [wrapped_sum(partitioner, state, x)] * 3, rtol=1e-5)


def wrapped_sum(partitioner, state, x):
    return (x @ softmax_of(without_padding(partitioner, state.mdl_vars))).sum()
