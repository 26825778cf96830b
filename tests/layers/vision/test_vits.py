"""Vision transformer: the real Pax's numbers, patches by hand, meshes, scanned, wrong settings."""

import functools

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from praxis_lite import ConfigError, layers
from praxis_lite.core import NnxModel
from praxis_lite.layers.vision.vits import image_to_patch
from praxis_tools.check.asserts.layers import assert_near, drawn
from tests.support.marks import every
from tests.support.pax_options import assert_equals_pax

partial = functools.partial
ENTRY = partial(layers.VitEntryLayers, patch_size=2, input_dims=4, output_dims=4)
EXIT = partial(layers.VitExitLayers, 4)
PAX = {
    "vit_mean": fdl.build(layers.build_vision_transformer((2, 3), 2, 1, 4, 6, 1, 2)),
    "entry_cls": partial(
        ENTRY, (2, 3), prepend_cls_tokens=1, append_cls_tokens=2, input_fc_has_bias=False
    ),
    "entry_interpolated": partial(ENTRY, (3, 2)),
    "entry_patches": partial(ENTRY, (2, 3)),
    "exit_projection_max": partial(
        EXIT,
        3,
        output_fc_tanh=False,
        pooling_tpl=partial(layers.GlobalPooling, (1,), pooling_type="MAX"),
    ),
    "exit_norm_alone": partial(EXIT, output_fc_tanh=False, pooled=False),
}


@pytest.mark.parametrize("name", every(2, PAX))
def test_outputs_and_gradients_equal_pax(name):
    assert_equals_pax("vits", name, PAX[name], lambda module, x, paddings: module(x))


def test_patches_are_cut_row_by_row():
    images = np.random.default_rng(1).normal(size=(2, 6, 4, 3)).astype(np.float32)
    actual = image_to_patch(jnp.asarray(images), 2)
    expected = [
        images[:, row : row + 2, column : column + 2].reshape(2, -1)
        for row in (0, 2, 4)
        for column in (0, 2)
    ]
    np.testing.assert_array_equal(actual, np.stack(expected, axis=1))


def test_the_built_transformer_takes_images_of_several_channels():
    build = fdl.build(layers.build_vision_transformer((2, 3), 2, 3, 4, 6, 1, 2))
    outputs = jax.eval_shape(lambda: build(rngs=nnx.Rngs(0))(jnp.ones((5, 4, 6, 3))))
    assert outputs.shape == (5, 4)


def test_the_class_token_is_what_the_pooling_takes():
    tokens = jnp.asarray(np.random.default_rng(2).normal(size=(2, 5, 4)), jnp.float32)
    exits = partial(EXIT, pre_ln=False, output_fc_tanh=False)
    for index in (0, -1):
        pooling = partial(layers.ClassTokenPooling, index)
        actual = exits(pooling_tpl=pooling, rngs=nnx.Rngs(0))(tokens)
        np.testing.assert_array_equal(actual, tokens[:, index])
    np.testing.assert_allclose(exits(rngs=nnx.Rngs(0))(tokens), tokens.mean(1), rtol=1e-5)


# Of images, too: what the mesh's 4 and 2 devices do not divide.
NUM_IMAGES, DIMS, NUM_HEADS, HIDDEN = 7, 7, 3, 11
BATCH = ("replica", "data")


def vit_of(stack=layers.Repeat, **entry):
    tokens = (BATCH, None, None)
    block = partial(
        layers.Transformer,
        DIMS,
        HIDDEN,
        NUM_HEADS,
        dim_per_head=3,
        mask_self_attention=False,
        tr_atten_tpl=partial(
            layers.DotProductAttention,
            weight_split_dims_mapping=("data", "mdl", None),
            activation_split_dims_mapping=(BATCH, None, "mdl", None),
            output_split_dims_mapping=tokens,
        ),
        tr_fflayer_tpl=partial(
            layers.TransformerFeedForward,
            weight_split_dims_mapping=("data", "mdl"),
            hidden_split_dims_mapping=(BATCH, None, "mdl"),
            activation_split_dims_mapping=tokens,
        ),
    )
    pooling = {"pooling_tpl": layers.ClassTokenPooling} if entry else {}
    return partial(
        layers.VisionTransformer,
        partial(
            layers.VitEntryLayers,
            (3, 2),
            2,
            4,
            DIMS,
            **entry,
            pos_emb_tpl=partial(
                layers.TrainablePositionalEmbedding, weight_split_dims_mapping=(None, "data")
            ),
            weight_split_dims_mapping=(None, "data"),
            activation_split_dims_mapping=tokens,
        ),
        partial(stack, block, 2),
        partial(
            layers.VitExitLayers,
            DIMS,
            5,
            weight_split_dims_mapping=("data", "mdl"),
            activation_split_dims_mapping=(BATCH, "mdl"),
            **pooling,
        ),
        activation_split_dims_mapping=tokens,
    )


def cases():
    x = np.random.default_rng(4).normal(size=(NUM_IMAGES, 6, 4, 1)).astype(np.float32)

    def call(module, x, key):
        return module(x, key=key)

    class_token = vit_of(prepend_cls_tokens=1, pos_emb_dropout_prob=0.3)
    return {"mean": (vit_of(), call, x), "class token": (class_token, call, x)}


def test_bfloat16_is_close_to_float32():
    build, _, x = cases()["mean"]
    model = NnxModel(build)
    mdl_vars = drawn(model)
    run = jax.jit(lambda x: model.module(mdl_vars)(x))
    half, whole = run(x.astype(jnp.bfloat16)), run(x)
    assert half.dtype == jnp.bfloat16
    assert 1e-4 < np.abs(np.float32(half) - whole).max() / np.abs(whole).max() < 0.03


@pytest.mark.slow
def test_a_scanned_stack_equals_blocks_in_a_row():
    scanned = NnxModel(vit_of())
    in_a_row = NnxModel(vit_of(layers.StackedTransformer))
    mdl_vars = drawn(scanned)
    params = dict(mdl_vars["params"])
    blocks = params["transformers_stack"]["blocks"]
    params["transformers_stack"] = {
        f"x_layers_{i}": jax.tree.map(lambda w, i=i: w[i], blocks) for i in range(2)
    }
    x = cases()["mean"][2]
    run = [
        jax.jit(lambda v, m=model: m.module(v)(x))(v)
        for model, v in ((scanned, mdl_vars), (in_a_row, {**mdl_vars, "params": params}))
    ]
    assert_near(*run)


def test_every_token_sees_every_other():
    """A causal block would leave the first token as it is."""
    model = NnxModel(vit_of(prepend_cls_tokens=1))
    mdl_vars = drawn(model)
    x = cases()["mean"][2][:1]
    changed = x.copy()
    changed[:, -1, -1] += 1.0  # In the last patch.
    first, second = map(jax.jit(lambda x: model.module(mdl_vars)(x)), (x, changed))
    assert np.abs(first - second).max() > 1e-4


WRONG = {
    r"patch_size.*2.*images.*\(1, 5, 4, 1\)": lambda r: ENTRY((2, 2), rngs=r)(
        jnp.ones((1, 5, 4, 1))
    ),
    r"VitEntryLayers\.input_dims.*4.*12": lambda r: ENTRY((2, 2), rngs=r)(jnp.ones((1, 4, 4, 3))),
    r"VitEntryLayers\.pos_emb_shapes.*\(5,\).*\(1, 4, 4, 1\).*4": lambda r: ENTRY((5,), rngs=r)(
        jnp.ones((1, 4, 4, 1))
    ),
    r"VitEntryLayers\.pos_emb_shapes\[1\].*0": lambda r: ENTRY((2, 0), rngs=r),
    r"VitEntryLayers\.patch_size.*0": lambda r: layers.VitEntryLayers((2, 2), 0, 4, 4, rngs=r),
    r"VitEntryLayers\.prepend_cls_tokens.*-1": lambda r: ENTRY(
        (2, 2), prepend_cls_tokens=-1, rngs=r
    ),
    r"VitExitLayers\.hidden_dim.*0": lambda r: layers.VitExitLayers(0, rngs=r),
    r"Dropout\.dropout_prob.*1\.0": lambda r: EXIT(output_dropout_prob=1.0, rngs=r),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_setting_names_the_layer_and_the_setting(message):
    with pytest.raises(ConfigError, match=message):
        jax.eval_shape(lambda: WRONG[message](nnx.Rngs(0)))
