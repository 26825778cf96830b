"""Residual networks: the real Pax's numbers, torchvision's parameter counts, meshes, training."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from praxis_lite import ConfigError, layers
from praxis_lite.core import Learner, NnxModel, Partitioner
from praxis_lite.tasks.image_classification import ClassificationTask
from praxis_tools.check.asserts.layers import assert_near, drawn
from tests.support.marks import slow_but
from tests.support.pax_options import assert_equals_pax

partial = functools.partial
CONV = partial(layers.ConvBNAct, batch_norm_tpl=partial(layers.BatchNorm, decay=0.9))
PAX = {
    "block_train": partial(layers.ResNetBlock, 3, 8, stride=2, conv_params=CONV),
    "basic_train": partial(layers.ResNetBasicBlock, 3, 3, conv_params=CONV, activation="swish"),
    "resnet_train": partial(
        layers.ResNet,
        channels=(8, 4),
        strides=(1, 2),
        blocks=(1, 1),
        kernels=(3, 1),
        entryflow_conv_kernel=(3, 3, 3),
        entryflow_conv_stride=(1, 2),
    ),
}


@pytest.mark.parametrize("name", slow_but({"block_train", "basic_train"}, PAX))
def test_outputs_gradients_and_new_statistics_equal_pax(name):
    def call(module, x, paddings):
        return module(x, key=jax.random.key(0))

    assert_equals_pax("vision", name, PAX[name], call)


@pytest.mark.parametrize(
    ("num_params", "settings"),
    [
        # torchvision's models, less their last layer of (features + 1) x 1000.
        pytest.param(25_557_032 - 2049 * 1000, {}, marks=pytest.mark.slow),
        (
            11_689_512 - 513 * 1000,
            {
                "block_params": layers.ResNetBasicBlock,
                "channels": (64, 128, 256, 512),
                "blocks": (2, 2, 2, 2),
            },
        ),
    ],
    ids=["ResNet-50", "ResNet-18"],
)
def test_the_usual_networks_have_the_usual_number_of_parameters(num_params, settings):
    model = NnxModel(partial(layers.ResNet, **settings))
    mdl_vars = jax.eval_shape(model.init, jax.random.key(0))
    assert sum(math.prod(w.shape) for w in jax.tree.leaves(mdl_vars["params"])) == num_params
    images = jax.ShapeDtypeStruct((2, 224, 224, 3), jnp.float32)
    features = jax.eval_shape(lambda v, x: model.module(v)(x), mdl_vars, images)
    assert features.shape == (2, settings.get("channels", (2048,))[-1])


def cases():
    """Of a number of images and of channels that the mesh's 4 and 2 devices do not divide."""
    num_images, channels = 7, 12
    x = np.random.default_rng(4).normal(size=(num_images, 6, 5, 3)).astype(np.float32)
    conv = partial(
        CONV,
        weight_split_dims_mapping=(None, None, "data", "mdl"),
        activation_split_dims_mapping=(("replica", "data"), None, None, "mdl"),
    )

    def train(module, x, key):
        return module(x, key=key)

    def evaluate(module, x, key):
        return module(x)

    build = partial(
        layers.ResNet,
        conv_params=conv,
        channels=(channels,),
        strides=(2,),
        blocks=(1,),
        kernels=(3,),
        entryflow_conv_kernel=(3, 3, 3),
        entryflow_conv_stride=(1, 1),
        block_params=partial(layers.ResNetBlock, residual_droppath_prob=0.4),
    )
    return {"trained": (build, train, x), "evaluated": (build, evaluate, x)}


def test_bfloat16_is_close_to_float32():
    build, call, x = cases()["evaluated"]
    model = NnxModel(build)
    mdl_vars = drawn(model)
    run = jax.jit(lambda x: call(model.module(mdl_vars), x, None))
    half, whole = run(x.astype(jnp.bfloat16)), run(x)
    assert half.dtype == jnp.bfloat16
    assert 1e-4 < np.abs(np.float32(half) - whole).max() / np.abs(whole).max() < 0.03


def test_a_block_that_starts_with_a_zero_scale_is_the_identity():
    block = layers.ResNetBlock(
        5, 5, zero_init_residual=True, activation="identity", rngs=nnx.Rngs(0)
    )
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, 3, 5)), jnp.float32)
    np.testing.assert_array_equal(jax.jit(lambda block, x: block(x))(block, x), x)


def test_block_features_are_those_of_each_stage():
    network = partial(
        layers.ResNet,
        channels=(8, 12),
        strides=(1, 2),
        blocks=(1, 1),
        kernels=(1, 1),
        entryflow_conv_kernel=(1, 1, 3),
        entryflow_conv_stride=(1, 1),
        entry_max_pool=False,
    )
    mdl_vars = drawn(NnxModel(network))

    @jax.jit
    def run(x):
        settings = ({"return_block_features": True}, {"output_spatial_pooling_params": None}, {})
        return [NnxModel(partial(network, **s)).module(mdl_vars)(x) for s in settings]

    features, last, pooled = run(np.random.default_rng(5).normal(size=(1, 6, 6, 3)))
    assert {level: f.shape for level, f in features.items()} == {2: (1, 6, 6, 8), 3: (1, 3, 3, 12)}
    np.testing.assert_array_equal(last, features[3])
    np.testing.assert_allclose(pooled, last.mean((1, 2)), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_training_a_resnet_moves_every_statistic_and_evaluation_none(mesh_of):
    network, _, x = cases()["trained"]
    softmax = partial(layers.FullSoftmax, 3, 12, weight_split_dims_mapping=("data", "mdl"))
    model = partial(layers.ClassificationModel, network, softmax)
    task = ClassificationTask(model, Learner(partial(optax.sgd), 0.1))
    partitioner = Partitioner(task, mesh_of(1, 4, 2))
    batch = partitioner.global_batch(
        {"inputs": x, "labels": np.arange(7) % 3, "weights": np.ones(7, np.float32)}
    )
    state, key = partitioner.init(partitioner.key(0)), partitioner.key(0)
    before = jax.device_get(state.mdl_vars["non_trainable"])
    state, _ = partitioner.train_step(state, batch, key)
    after = jax.device_get(state.mdl_vars["non_trainable"])
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), after, before)
    assert len(jax.tree.leaves(moved)) == 10  # A mean and a variance of 5 convolutions.
    assert min(jax.tree.leaves(moved)) > 0
    partitioner.eval_step(state.mdl_vars, batch)
    assert_near(jax.device_get(state.mdl_vars["non_trainable"]), after, tolerance=0.0)


NO_NORM = partial(layers.ConvBNAct, batch_norm_tpl=None)
WRONG = {
    r"ResNet\.blocks.*\(1, 2\).*1": lambda r: layers.ResNet(
        strides=(1,), channels=(8,), blocks=(1, 2), kernels=(3,), rngs=r
    ),
    r"ResNet\.entryflow_conv_kernel.*\(7, 7\)": lambda r: layers.ResNet(
        entryflow_conv_kernel=(7, 7), rngs=r
    ),
    r"ResNetBlock\.kernel_size.*0": lambda r: layers.ResNetBlock(3, 8, kernel_size=0, rngs=r),
    r"ResNetBlock\.output_dim.*3.*4": lambda r: layers.ResNetBlock(3, 3, rngs=r),
    r"ResNetBlock\.zero_init_residual.*True": lambda r: layers.ResNetBlock(
        3, 8, conv_params=NO_NORM, zero_init_residual=True, rngs=r
    ),
    r"StochasticResidual\.survival_prob.*-1\.0": lambda r: layers.ResNetBlock(
        3, 8, residual_droppath_prob=2.0, rngs=r
    ),
    r"ResNetBlock\.activation.*'rulu'": lambda r: layers.ResNetBlock(
        3, 8, activation="rulu", rngs=r
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_setting_names_the_layer_and_the_setting(message):
    with pytest.raises(ConfigError, match=message):
        jax.eval_shape(lambda: WRONG[message](nnx.Rngs(0)))
