"""Adafactor against Pax's goldens, and against the real Pax on other options."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from praxis_lite.core import Learner, WeightSpec
from praxis_lite.optimizers import adafactor
from tests.support.goldens import golden, golden_arrays, pax_cases
from tests.support.marks import every

SLOTS = ("m", "m_scale", "vr", "vc", "v")


def nested(flat):
    tree = {}
    for path, leaf in flat.items():
        *names, last = path.split("/")
        node = tree
        for name in names:
            node = node.setdefault(name, {})
        node[last] = leaf
    return tree


def flattened(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def scanned(init, update, params, grads):
    """Returns the params after each step, [steps, ...] by path, and the last state."""
    stacked_grads = {path: np.stack([grad[path] for grad in grads]) for path in grads[0]}

    @jax.jit
    def run(params, grads):
        def step(carry, grad):
            params, state = update(*carry, grad)
            return (params, state), params

        start = params, init(params)
        (_, state), history = jax.lax.scan(step, start, grads)
        return history, state

    history, state = run(nested(params), nested(stacked_grads))
    return flattened(history), state


def test_defaults_are_those_of_pax():
    theirs = golden("pax/cases.json")["class_defaults"]["ShardedAdafactor"]
    ours = dict(adafactor.__kwdefaults__)
    assert ours.pop("exclude_from_layerwise_adaptation") == ()  # None in Pax.
    assert ours == {name: theirs[name] for name in ours} and len(ours) == 14


@pytest.mark.parametrize(
    "name",
    every(3, [n for n, case in pax_cases().items() if case.get("optimizer") == "ShardedAdafactor"]),
)
def test_golden_of_pax(name):
    case = pax_cases()[name]
    settings = dict(case["hparams"]["optimizer"])
    assert settings.pop("class") == "ShardedAdafactor"
    del settings["learning_rate"], settings["lr_schedule"]  # Their product is in the file.
    arrays = golden_arrays(f"pax/adafactor/{name}.npz")

    def at(prefix):
        start = f"{prefix}/params/"
        return {path.removeprefix(start): a for path, a in arrays.items() if path.startswith(start)}

    rates = np.stack([arrays[f"out/lr{i}"] for i in range(5)])
    grads = [at(f"in/grad{i}") for i in range(5)]
    learner = Learner(functools.partial(adafactor, **settings), lambda i: jnp.asarray(rates)[i])
    specs = nested({path: WeightSpec(w.shape, jnp.float32) for path, w in at("w").items()})
    bound = learner.bind(specs)
    history, states = scanned(
        bound.init,
        lambda params, states, grad: bound.update(grad, states, params, 0.0)[:2],
        at("w"), grads,
    )  # fmt: skip
    state = states["slots"]["unstacked"]
    assert state.count == 5
    tolerance = {key: case["tolerance"].get(key, 0.0) for key in ("rtol", "atol", "atol_of_max")}

    def assert_near(actual, wanted, path):
        atol = tolerance["atol"] + tolerance["atol_of_max"] * np.abs(wanted).max()
        np.testing.assert_allclose(actual, wanted, tolerance["rtol"], atol, err_msg=path)

    for i in range(5):
        expected = at(f"out/w{i}")
        assert history.keys() == expected.keys() and len(expected) == 4
        for path, weights in history.items():
            assert_near(weights[i], expected[path], f"w{i}/{path}")
    for kind in SLOTS:
        expected, slots = at(f"out/state/2/{kind}"), flattened(getattr(state, kind))
        assert slots.keys() == expected.keys() and len(expected) == 4
        for path, slot in slots.items():
            # Of the same shapes and dtypes, those that stand for an absent slot too.
            assert (slot.shape, slot.dtype) == (expected[path].shape, expected[path].dtype), path
            if slot.dtype == np.int8:  # A tie may round the other way.
                assert np.abs(slot.astype(int) - expected[path].astype(int)).max() <= 1
            else:
                assert_near(slot, expected[path], f"{kind}/{path}")


@pytest.mark.parametrize(
    "name",
    every(
        3,
        [
            "adam_b",
            "bfloat16",
            "int16_unfactored",
            "weight_decay",
            "weight_decay_by_path",
            "parameter_scale",
            "sorted_dims",
            "no_clip",
            "clip_0.5_epsilon",
            "layerwise",
        ],
    ),
)
def test_options_equal_real_pax(name):
    """Four steps, the third with gradients 30 times as large; blocks/w is a stack of 3 layers."""
    numbers = golden_arrays("pax_options/optimizers/adafactor_options.npz")

    def at(prefix):
        return {p.removeprefix(prefix): a for p, a in numbers.items() if p.startswith(prefix)}

    def ours(pattern):  # Our paths do not begin with "params/".
        return pattern.removeprefix("params/")

    settings = json.loads(str(numbers[f"{name}/hparams"]))
    if isinstance(decays := settings.get("weight_decay"), dict):
        settings["weight_decay"] = {ours(pattern): decay for pattern, decay in decays.items()}
    if excluded := settings.get("exclude_from_layerwise_adaptation"):
        settings["exclude_from_layerwise_adaptation"] = [ours(pattern) for pattern in excluded]
    rates = jnp.asarray(numbers["in/lr"])
    optimizer = adafactor(lambda count: rates[count], **settings)
    groups = {("blocks",): jax.vmap, ("cube", "dense", "gain", "one"): lambda fn: fn}

    def init(params):
        return [
            vmapped(optimizer.init)({name: params[name] for name in local})
            for local, vmapped in groups.items()
        ]

    def update(params, states, grads):
        updates, new_states = {}, []
        for (own, vmapped), state in zip(groups.items(), states, strict=True):
            group = [{name: tree[name] for name in own} for tree in (grads, params)]
            group_updates, state = vmapped(optimizer.update)(group[0], state, group[1])
            updates |= group_updates
            new_states.append(state)
        return optax.apply_updates(params, updates), new_states

    grads = [at(f"in/grad{i}/") for i in range(4)]
    history, states = scanned(init, update, at("in/w/"), grads)
    slots = {
        kind: {path: slot for s in states for path, slot in flattened(getattr(s, kind)).items()}
        for kind in SLOTS
    }

    def raveled(leaves):
        return np.concatenate([np.float32(leaf).ravel() for _, leaf in sorted(leaves.items())])

    is_quantized = settings.get("beta1") and settings.get("quantized_dtype") != "float32"
    tolerance = {"rtol": 1e-3, "atol": 1e-3} if is_quantized else {"rtol": 2e-5, "atol": 2e-6}
    last = {path: weights[-1] for path, weights in history.items()}
    np.testing.assert_allclose(raveled(last), numbers[f"{name}/w"], **tolerance)
    num_compared = 0
    for kind in SLOTS:
        # Left out of the file: what stands for an absent slot.
        present = {
            path: slot
            for path, slot in slots[kind].items()
            if slot.shape[path == "blocks/w" :] != (1,) or (path == "one/w" and slot.any())
        }
        assert bool(present) == (f"{name}/{kind}" in numbers)
        if present:
            actual, expected = raveled(present), numbers[f"{name}/{kind}"]
            if kind == "m" and np.issubdtype(present["one/w"].dtype, np.integer):
                assert np.abs(actual - expected).max() <= 1
            else:
                np.testing.assert_allclose(actual, expected, **tolerance)
            num_compared += len(present)
    assert num_compared >= 6
