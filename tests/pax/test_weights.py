"""Pax's variables in our models: stacks in every form, padding, what is left over or missing."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from praxis_lite import ConfigError, layers
from praxis_lite.core import NnxModel
from praxis_lite.layers import BatchNorm, Pipeline, Repeat, StackedTransformer, lora
from praxis_lite.pax.paths import StackPath, flat_pax_vars, stack_path
from praxis_lite.pax.weights import mdl_vars_from_pax, pax_vars_from_mdl_vars
from tests.support.goldens import golden_arrays

NUM_LAYERS, D, F = 6, 5, 7
BLOCK = functools.partial(layers.FeedForward, D, F)
RNG = np.random.default_rng(0)
W = RNG.normal(size=(NUM_LAYERS, D, F)).astype(np.float32)
B = RNG.normal(size=(NUM_LAYERS, F)).astype(np.float32)


def named(prefix: str, w: np.ndarray, b: np.ndarray) -> dict[str, np.ndarray]:
    return {f"{prefix}/linear/w": w, f"{prefix}/bias/b": b}


def per_layer(prefix: str, lead: tuple[int, ...], per_block: int) -> dict[str, np.ndarray]:
    """Returns the layers as blocks of `per_block`, with leading dims `lead` for the blocks."""
    actual = {}
    for j in range(per_block):
        of_j = (x[j::per_block].reshape(*lead, *x.shape[1:]) for x in (W, B))
        actual |= named(f"{prefix}/x_layers_{j}", *of_j)
    return actual


PAX_FORMS = {
    "unrolled": per_layer("transformer", (), NUM_LAYERS),
    "repeated": per_layer("transformer/repeat/sub", (6,), 1),
    "repeated_pairs": per_layer("transformer/repeat/sub", (3,), 2),
    "nd_prefix": per_layer("transformer/repeat/sub", (3, 2), 1),
    "pipeline": per_layer("transformer/pipeline/body", (3,), 2),
    "circular_pipeline": per_layer("transformer/pipeline/body", (3, 2), 1),
    "circular_pipeline_of_repeats": per_layer("transformer/pipeline/body/repeat/sub", (3, 1, 2), 1),
}


def pairs(rngs: nnx.Rngs) -> StackedTransformer:
    return StackedTransformer(BLOCK, 2, rngs=rngs)


class Model(nnx.Module):
    def __init__(self, stack, rngs):
        self.transformer = stack(rngs=rngs)


def stacked_model(stack: Any) -> NnxModel:
    return NnxModel(functools.partial(Model, stack))


# Ours: what builds the stack, and how it holds layers 0 to 5.
OUR_FORMS = {
    "scanned": (functools.partial(Repeat, BLOCK, 6), ["blocks"], [range(6)]),
    "unrolled": (
        functools.partial(Repeat, BLOCK, 6, unroll=True),
        [f"blocks/{i}" for i in range(6)],
        range(6),
    ),
    "in_a_row": (
        functools.partial(StackedTransformer, BLOCK, 6),
        [f"x_layers_{i}" for i in range(6)],
        range(6),
    ),
    "scanned_pairs": (
        functools.partial(Repeat, pairs, 3),
        ["blocks/x_layers_0", "blocks/x_layers_1"],
        [[0, 2, 4], [1, 3, 5]],
    ),
    "unrolled_pairs": (
        functools.partial(Repeat, pairs, 3, unroll=True),
        [f"blocks/{i}/x_layers_{j}" for i in range(3) for j in range(2)],
        range(6),
    ),
    "pipeline": (
        functools.partial(Pipeline, BLOCK, 6, num_stages=2, num_microbatches=2,
                          circular_repeat=3),
        ["blocks"],
        [np.arange(6).reshape(3, 2, 1)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("our_form", OUR_FORMS)
@pytest.mark.parametrize("pax_form", PAX_FORMS)
def test_every_form_of_a_stack_gives_every_other(pax_form, our_form):
    build, paths, held = OUR_FORMS[our_form]
    actual = mdl_vars_from_pax(stacked_model(build), PAX_FORMS[pax_form])
    assert actual["non_trainable"] == {}
    flat = flat_pax_vars(actual["params"])
    assert len(flat) == 2 * len(paths)
    for path, which in zip(paths, held, strict=True):
        index = np.asarray(which, int)
        np.testing.assert_array_equal(flat[f"transformer/{path}/linear/w"], W[index])
        np.testing.assert_array_equal(flat[f"transformer/{path}/bias/b"], B[index])


@pytest.mark.parametrize("our_form", OUR_FORMS)
def test_and_back(our_form):
    model = stacked_model(OUR_FORMS[our_form][0])
    mdl_vars = mdl_vars_from_pax(model, PAX_FORMS["unrolled"])
    back = pax_vars_from_mdl_vars(model, mdl_vars)
    form = {
        "scanned": "repeated", "pipeline": "repeated", "scanned_pairs": "repeated_pairs"
    }.get(our_form, "unrolled")  # fmt: skip
    expected = {f"params/{path}": array for path, array in PAX_FORMS[form].items()}
    assert back.keys() == expected.keys()
    for path, array in expected.items():
        np.testing.assert_array_equal(back[path], array)


def test_a_real_circular_pipelines_weights_give_its_outputs_in_a_plain_stack():
    """3 circular repeats of 2 stages of 2 layers each, run by praxis 1.4.0."""
    numbers = golden_arrays("pax_checkpoints/circular_pipeline.npz")
    block = functools.partial(layers.Transformer, 6, 5, 2)
    model = NnxModel(
        lambda rngs: Repeat(
            functools.partial(StackedTransformer, block, 2), 6, rngs=rngs
        )
    )  # fmt: skip
    weights = {path.removeprefix("w/"): w for path, w in numbers.items() if path[:2] == "w/"}
    mdl_vars = mdl_vars_from_pax(model, weights)
    actual, _ = jax.jit(lambda v, x: model.module(v)(x))(mdl_vars, numbers["in/x"])
    np.testing.assert_allclose(actual, numbers["out/y"], rtol=1e-4, atol=2e-5)


def test_paths_come_in_every_way_of_writing():
    nested: dict[str, Any] = {}
    for path, array in PAX_FORMS["repeated"].items():
        *parents, name = path.split("/")
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = array
    flat = PAX_FORMS["repeated"]
    model = stacked_model(OUR_FORMS["scanned"][0])
    expected = mdl_vars_from_pax(model, flat)
    for ways in (
        nested,
        {"params": {"lm": nested}},
        {"mdl_vars": {"params": {"lm": nested}}, "step": 3, "opt_states": [nested]},
        {f"params/lm/{path}": array for path, array in flat.items()},
        {f"mdl_vars.params.lm.{path.replace('/', '.')}": array for path, array in flat.items()},
    ):
        jax.tree.map(np.testing.assert_array_equal, mdl_vars_from_pax(model, ways), expected)


def test_padding_is_cut_and_anything_else_is_an_error():
    def padded(x, shape, fill=0.0):
        whole = np.full(shape, fill, np.float32)
        whole[tuple(map(slice, x.shape))] = x
        return whole

    model = stacked_model(OUR_FORMS["unrolled"][0])
    prefix = "transformer/repeat/sub/x_layers_0"
    expected = mdl_vars_from_pax(model, PAX_FORMS["repeated"])
    good = named(prefix, padded(W, (6, 8, 8)), padded(B, (6, 8)))
    jax.tree.map(np.testing.assert_array_equal, mdl_vars_from_pax(model, good), expected)

    bad = named(prefix, padded(W, (6, 8, 8), fill=1e-9), padded(B, (6, 8)))
    message = r"linear/w.*\(8, 8\).*\(5, 7\)"
    with pytest.raises(ConfigError, match=message):
        mdl_vars_from_pax(model, bad)


def test_another_shape_or_rank_is_an_error_that_names_both():
    model = NnxModel(BLOCK)
    for w, b, message in (
        (W[0, :, :3], B[0], r"linear/w.*\(5, 3\).*\(5, 7\)"),
        (W[0], B[:1], r"bias/b.*\(1, 7\).*\(7,\)"),
        (W[0, 0], B[0, :2], r"linear/w.*\(7,\)"),
    ):
        with pytest.raises(ConfigError, match=message):
            mdl_vars_from_pax(model, {"linear/w": w, "bias/b": b})


def test_all_that_is_missing_or_left_over_is_listed_with_close_names():
    model = NnxModel(BLOCK)
    with pytest.raises(ConfigError) as error:
        mdl_vars_from_pax(model, {"linear/w": W[0], "bais/b": B[0], "linear/scale": B[0]})
    message = str(error.value)
    assert "params/bias/b " in message and "bais/b?" in message and "linear/scale" in message
    actual = mdl_vars_from_pax(
        model, {"linear/w": W[0], "bias/b": B[0], "linear/scale": B[0]}, ignore=["*/scale"]
    )
    np.testing.assert_array_equal(actual["params"]["bias"]["b"], B[0])


def test_what_pax_has_nothing_for_is_drawn_if_named():
    """Adapters beside the weights of a scanned stack."""
    block = functools.partial(lora(layers.FeedForward, rank=2), D, F)
    model = stacked_model(functools.partial(Repeat, block, 6))
    with pytest.raises(ConfigError, match=r"lora_a.*\(layers.*0.*1.*2.*3.*4.*5\)"):
        mdl_vars_from_pax(model, PAX_FORMS["repeated"])
    key = jax.random.key(3)
    actual = mdl_vars_from_pax(model, PAX_FORMS["repeated"], new=["*/lora_?"], key=key)
    linear = actual["params"]["transformer"]["blocks"]["linear"]
    np.testing.assert_array_equal(linear["w"], W)
    drawn = jax.jit(model.init)(key)["params"]["transformer"]["blocks"]["linear"]
    np.testing.assert_array_equal(linear["lora_a"], drawn["lora_a"])
    assert np.abs(linear["lora_a"]).max() > 0.1


def test_layers_too_many_or_too_few_are_named():
    build = functools.partial(Repeat, BLOCK, 4)
    with pytest.raises(ConfigError, match=r"x_layers_0/linear/w.*\(layers.*4.*5\)"):
        mdl_vars_from_pax(stacked_model(build), PAX_FORMS["repeated"])
    build = functools.partial(Repeat, BLOCK, 8, unroll=True)
    with pytest.raises(ConfigError, match=r"blocks/7/linear/w.*\(layers.*7\)"):
        mdl_vars_from_pax(stacked_model(build), PAX_FORMS["repeated"])


def test_moving_statistics_are_not_trained_and_dtypes_are_the_models():
    model = NnxModel(functools.partial(BatchNorm, 3))
    pax_vars = {
        "params": {"beta": np.zeros(3, "float16"), "gamma": np.ones(3)},
        "non_trainable": {"moving_mean": np.full(3, 2.0), "moving_variance": np.full(3, 5.0)},
    }
    actual = mdl_vars_from_pax(model, pax_vars)
    assert {x.dtype for x in jax.tree.leaves(actual)} == {np.dtype("float32")}
    np.testing.assert_array_equal(actual["non_trainable"]["moving_variance"], [5.0] * 3)
    back = pax_vars_from_mdl_vars(model, actual)
    assert sorted(back) == [
        "non_trainable/moving_mean", "non_trainable/moving_variance", "params/beta", "params/gamma",
    ]  # fmt: skip


def test_paths_are_split_at_their_stack():
    assert stack_path("softmax/w") == StackPath("softmax/w")
    assert stack_path("x_layers_3/w") == StackPath("", "w", inner=3)
    assert stack_path("a/blocks/2/x_layers_1/w") == StackPath("a", "w", block=2, inner=1)
    path = "a/pipeline/body/repeat/sub/x_layers_4/b/w"
    assert stack_path(path) == StackPath("a", "b/w", True, 0, 4)
    assert stack_path("a/blocks/b/w") == StackPath("a", "b/w", True)


def test_an_mlp_is_paxs_mlp_block():
    model = NnxModel(functools.partial(layers.Mlp, 3, (5, 7), 2))
    sizes = [(3, 5), (5, 7), (7, 2)]
    pax_vars = {}
    for i, size in enumerate(sizes):
        pax_vars |= named(f"params/mlp_layers_{i}", np.full(size, i, "f"), np.zeros(size[1], "f"))
    actual = mdl_vars_from_pax(model, pax_vars)
    np.testing.assert_array_equal(actual["params"]["hidden"]["1"]["linear"]["w"], np.ones((5, 7)))
    np.testing.assert_array_equal(actual["params"]["logits"]["linear"]["w"], np.full((7, 2), 2))
    assert pax_vars_from_mdl_vars(model, actual).keys() == pax_vars.keys()
