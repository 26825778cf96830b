"""Weights as decoding reads them: layers apart, the same bits, nothing copied in the loop."""

import functools
import re

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from praxis_lite import ConfigError
from praxis_lite.core import Learner, MeshConfig, Partitioner, make_mesh
from praxis_lite.core.models.stacked_weights import UnstackedLayers
from praxis_lite.core.partitioner import steps
from praxis_lite.decode import BeamSearch, Greedy, Sample, stored_forms
from praxis_lite.layers import DotProductAttention, Pipeline, Repeat, Transformer, TransformerLm
from praxis_lite.tasks.language_model import LanguageModelTask
from tests.support.lm_runs import drawn_weights

V, D, H, L, P, M = 17, 12, 20, 2, 4, 6
BATCH = {
    "ids": np.arange(5 * P, dtype=np.int32).reshape(5, P) % V,
    "prefix_lengths": np.asarray([4, 2, 3, 1, 4], np.int32),
    "weights": np.ones(5, np.float32),
}
SPEC = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in BATCH.items()}
DECODERS = {
    "greedy": Greedy(max_decode_steps=M, eos_id=()),
    "activations": Greedy(max_decode_steps=M, eos_id=(), weights_dtype="activations"),
    "int8": Greedy(max_decode_steps=M, eos_id=(), weights_dtype="int8"),
    "outputs_first": Greedy(max_decode_steps=M, eos_id=(), weights_outputs_first=True),
    "sample": Sample(max_decode_steps=M, eos_id=3, num_samples=2, temperature=2.0),
    "beam": BeamSearch(max_decode_steps=M, eos_id=3, beam_size=3),
}
PATTERN = [fdl.Partial(Transformer), fdl.Partial(Transformer)]


PARTITIONERS = {}


def partitioner_of(decoder="greedy", shape=(1, 1, 1), num_layers=L, **model):
    """Returns a partitioner, which the tests of the file share with its compiled programs."""
    key = str((decoder, shape, num_layers, model))
    if key not in PARTITIONERS:
        PARTITIONERS[key] = new_partitioner(decoder, shape, num_layers, **model)
    return PARTITIONERS[key]


def new_partitioner(decoder, shape, num_layers, **model):
    lm = fdl.Partial(
        TransformerLm,
        V,
        D,
        H,
        num_heads=3,
        num_layers=num_layers,
        dim_per_head=4,
        position_emb_tpl=None,
        **model,
    )
    task = LanguageModelTask(fdl.build(lm), Learner(optax.sgd, 0.1), decoder=DECODERS[decoder])
    return Partitioner(task, make_mesh(MeshConfig(ici_mesh_shape=shape)))


@functools.cache
def weights_of(partitioner):
    return drawn_weights(partitioner)


@functools.cache
def program(partitioner):
    decode = functools.partial(steps.decode_step, partitioner.task)
    return jax.jit(partitioner.with_mdl_vars(decode))


def decoded(partitioner, mdl_vars):
    """Returns the outputs of the task's decoding, whatever form its weights are in."""
    inputs = {name: jnp.asarray(x) for name, x in BATCH.items()}
    return jax.device_get(program(partitioner)(mdl_vars, inputs, jax.random.key(0)))


@pytest.mark.parametrize(
    "decoder, shape, model",
    [
        pytest.param("beam", (1, 4, 2), {}, marks=pytest.mark.slow),
        pytest.param(
            "sample",
            (1, 1, 1),
            {"transformer_layer_tpl": PATTERN, "num_layers": 4},
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_layers_apart_give_the_same_bits_as_the_stack(decoder, shape, model):
    partitioner = partitioner_of(decoder, shape, **model)
    mdl_vars = weights_of(partitioner)
    actual = decoded(partitioner, partitioner.for_decoding(mdl_vars))
    expected = decoded(partitioner, mdl_vars)
    assert np.ptp(expected["output_ids"]) > 0
    for name, x in expected.items():
        np.testing.assert_array_equal(actual[name], x, err_msg=name)
    if decoder != "sample":
        batch = partitioner.global_batch(BATCH)
        outputs = partitioner.decode_step(mdl_vars, batch, partitioner.key(0))
        np.testing.assert_array_equal(outputs["output_ids"], expected["output_ids"])


def test_each_layer_lies_as_its_stack_did_and_the_rest_is_the_same_array():
    partitioner = partitioner_of(shape=(1, 4, 2))
    mdl_vars = weights_of(partitioner)
    weights = partitioner.for_decoding(mdl_vars)
    stack = mdl_vars["params"]["transformer"]["blocks"]["ff_layer"]["ffn_layer1"]["linear"]["w"]
    apart = weights["params"]["transformer"]["blocks"]["ff_layer"]["ffn_layer1"]["linear"]["w"]
    assert isinstance(apart, UnstackedLayers) and len(apart.layers) == L
    for layer, expected in zip(apart.layers, np.asarray(stack), strict=True):
        np.testing.assert_array_equal(layer, expected)
        assert layer.sharding.spec == PartitionSpec(*stack.sharding.spec[1:])
    assert weights["params"]["final_ln"]["scale"] is mdl_vars["params"]["final_ln"]["scale"]
    assert partitioner.for_decoding(weights) is weights
    assert not stack.is_deleted()


def test_donated_stacks_are_deleted_and_other_weights_are_kept():
    partitioner = partitioner_of()
    mdl_vars = drawn_weights(partitioner)  # No other test's.
    partitioner.for_decoding(mdl_vars, donates=True)
    blocks = jax.tree.leaves(mdl_vars["params"]["transformer"]["blocks"])
    assert all(x.is_deleted() for x in blocks)
    assert not mdl_vars["params"]["final_ln"]["scale"].is_deleted()


def test_a_stack_whose_layers_are_split_over_devices_stays_one():
    split = fdl.Partial(Repeat, stack_split="data")
    partitioner = partitioner_of(shape=(1, 2, 1), stacked_transformer_tpl=split)
    mdl_vars = weights_of(partitioner)
    assert partitioner.for_decoding(mdl_vars) is mdl_vars


@pytest.mark.parametrize(
    "pipelined, shape",
    [
        pytest.param(None, (1, 2, 1), marks=pytest.mark.nightly),
        pytest.param(None, (2, 2, 1), marks=pytest.mark.nightly),  # The stages lie on devices.
        pytest.param(True, (1, 1, 1), marks=pytest.mark.nightly),
    ],
)
def test_the_layers_of_a_pipeline_are_apart_where_no_axis_splits_its_stages(pipelined, shape):
    pipeline = fdl.Partial(
        Pipeline,
        num_stages=2,
        num_microbatches=1,
        pipelined=pipelined,
        stage_axis="replica",
    )
    partitioner = partitioner_of(shape=shape, num_layers=4, stacked_transformer_tpl=pipeline)
    mdl_vars = partitioner.init(partitioner.key(0)).mdl_vars
    weights = partitioner.for_decoding(mdl_vars)
    assert (weights is mdl_vars) == (shape[0] > 1 or bool(pipelined))
    repeated = partitioner_of(num_layers=4)
    # The same key draws the same layers.
    expected = decoded(repeated, repeated.init(repeated.key(0)).mdl_vars)
    actual = decoded(partitioner, weights)
    np.testing.assert_array_equal(actual["output_ids"], expected["output_ids"])


@pytest.mark.slow
def test_weights_in_the_activations_dtype_are_those_that_the_model_casts():
    partitioner = partitioner_of("activations", fprop_dtype=jnp.bfloat16)
    mdl_vars = weights_of(partitioner)
    weights = partitioner.for_decoding(mdl_vars)
    assert partitioner.for_decoding(weights) is weights
    dtypes = {
        jax.tree_util.keystr(keys, simple=True, separator="/"): x.dtype
        for keys, x in jax.tree.leaves_with_path(weights["params"])
    }
    assert "params/softmax/logits_ffn/linear/w" in stored_forms(partitioner.task)
    # Norms compute in float32 with their scales, and biases are cast after they are broadcast.
    kept = {path for path, dtype in dtypes.items() if dtype == jnp.float32}
    assert {path.split("/layers/")[0].split("/")[-2] for path in kept} == {
        "final_ln",
        "layer_norm",
        "per_dim_scale",
    }
    assert dtypes["softmax/logits_ffn/linear/w"] == jnp.bfloat16
    actual = decoded(partitioner, weights)
    expected = decoded(partitioner, mdl_vars)
    # XLA rounds at other places in a scan: of two tokens that are as likely either may come, and
    # then a row goes on differently.
    is_same = actual["output_ids"] == expected["output_ids"]
    comparable = np.cumsum(~is_same, axis=-1) - ~is_same == 0
    assert comparable.mean() > 0.8
    np.testing.assert_allclose(
        actual["logprobs"][comparable], expected["logprobs"][comparable], atol=0.05
    )


class Chain(nnx.Module):
    """Logits of the next token by the last one: `table` is always cast, and `scale` is not."""

    def __init__(self, *, rngs):
        self.table, self.scale = nnx.Param(jnp.ones((V, V))), nnx.Param(jnp.ones(()))

    def init_cache(self, batch_size, max_seq_length):
        return {"last": jnp.zeros((batch_size, 1), jnp.int32)}

    def __call__(self, ids, *, positions=None, paddings=None, cache=None):
        logits = self.table[...].astype(jnp.bfloat16)[ids] * self.scale[...]
        return logits, {"last": ids[:, -1:]}


def task_of_chain(**settings):
    decoder = Greedy(max_decode_steps=M, eos_id=(), **settings)
    return LanguageModelTask(Chain, Learner(optax.sgd, 0.1), decoder=decoder)


def test_only_weights_that_are_always_cast_are_stored_in_a_narrower_dtype():
    forms = stored_forms(task_of_chain(weights_dtype="activations"))
    assert {path: form.dtype for path, form in forms.items()} == {"params/table": jnp.bfloat16}


@pytest.mark.parametrize("setting", [{"weights_dtype": "int8"}, {"weights_outputs_first": True}])
def test_a_form_of_dense_layers_needs_a_dense_layer(setting):
    ((name, value),) = setting.items()
    with pytest.raises(ConfigError, match=rf"Greedy\.{name} is {value!r}.*no dense layers"):
        stored_forms(task_of_chain(**setting))


def rounded_by_numpy(mdl_vars, summed):
    """Returns weights as int8 has them, in float32: 127 is the largest of an output channel."""

    def rounded(keys, x):
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        names = [name for name in summed if name in path]
        if not names:
            return x
        x = np.asarray(x)
        largest = np.abs(x).max(axis=summed[names[0]], keepdims=True)
        scale = (np.where(largest > 0, largest, 127) / 127).astype(np.float32)
        return jnp.asarray(np.round(x / scale) * scale)

    return jax.tree.map_with_path(rounded, mdl_vars)


SUMMED = {
    "query/w": (-3,),
    "key/w": (-3,),
    "value/w": (-3,),
    "post/w": (-2, -1),
    "linear/w": (-2,),
}


def test_int8_weights_give_the_numbers_of_weights_that_numpy_rounded():
    partitioner = partitioner_of("int8", (1, 2, 2))
    mdl_vars = weights_of(partitioner)
    weights = partitioner.for_decoding(mdl_vars)
    layer = weights["params"]["transformer"]["blocks"]["ff_layer"]["ffn_layer1"]["linear"]["w"]
    assert layer.layers[0].values.dtype == jnp.int8
    single = partitioner_of()
    whole = rounded_by_numpy(weights_of(single), SUMMED)
    expected = decoded(single, whole)
    actual = decoded(partitioner, weights)
    np.testing.assert_allclose(actual["logprobs"], expected["logprobs"], atol=1e-5)
    np.testing.assert_array_equal(actual["output_ids"], expected["output_ids"])
    exact = decoded(single, weights_of(single))
    assert np.abs(exact["logprobs"] - expected["logprobs"]).max() > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape, tr_atten_tpl",
    [
        ((1, 2, 2), {}),
        pytest.param((1, 1, 1), {"combine_qkv": True}, marks=pytest.mark.nightly),
        pytest.param((1, 1, 1), {"output_proj_use_nhd_shape": True}, marks=pytest.mark.nightly),
    ],
)
def test_weights_with_their_outputs_first_give_the_same_tokens(shape, tr_atten_tpl):
    attention = fdl.Partial(DotProductAttention, **tr_atten_tpl)
    layer = fdl.Partial(Transformer, tr_atten_tpl=attention)
    partitioner = partitioner_of("outputs_first", shape, transformer_layer_tpl=layer)
    weights = partitioner.for_decoding(weights_of(partitioner))
    block = weights["params"]["transformer"]["blocks"]
    turned = block["ff_layer"]["ffn_layer1"]["linear"]["w"].layers[0]
    stack = weights_of(partitioner)["params"]["transformer"]["blocks"]["ff_layer"]["ffn_layer1"]
    np.testing.assert_array_equal(turned.values, np.asarray(stack["linear"]["w"][0]).T)
    split = stack["linear"]["w"].sharding.spec
    assert tuple(turned.values.sharding.spec) == (split[2], split[1])
    single = partitioner_of(transformer_layer_tpl=layer)
    expected = decoded(single, weights_of(single))
    actual = decoded(partitioner, weights)
    np.testing.assert_array_equal(actual["output_ids"], expected["output_ids"])
    np.testing.assert_allclose(actual["logprobs"], expected["logprobs"], atol=1e-5)


def test_a_product_reads_a_weight_with_its_outputs_first_as_its_first_factor():
    text = partitioner_of("outputs_first").decode_step.lower(SPEC).compile().as_text()
    # Its shape in the loop is that of the parameter, and no copy of it is made.
    assert f"f32[{H},{D}]" in text
    shapes = f"{H},{D}|{D},{H}|{D},{D}|{D},3,4|3,4,{D}"
    moved = re.findall(rf"= f32\[(?:{shapes})\]\S* (?:copy|transpose)\(.*while/body", text)
    assert not moved


def test_the_loop_reads_int8_and_keeps_no_matrix_of_floats():
    text = partitioner_of("int8").decode_step.lower(SPEC).as_text()
    assert f"tensor<{D}x{H}xi8>" in text
    body = text[text.index("stablehlo.while") :]
    assert "optimization_barrier" in body


def test_weights_of_another_model_are_refused():
    with pytest.raises(ConfigError, match="ff_layer.*shape.*expected"):
        partitioner_of(num_layers=L + 1).for_decoding(weights_of(partitioner_of()))


def test_the_program_has_no_stack_of_weights():
    text = partitioner_of().decode_step.lower(SPEC).as_text()
    # Each matrix is an argument of its own, and no stack of them is anywhere.
    assert f"tensor<{D}x{H}xf32>" in text and f"tensor<{L}x{D}x{H}xf32>" not in text
