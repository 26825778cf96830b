"""The compiled loop moves nothing of a cache but each token's new row."""

import re

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from praxis_lite.core import Learner, MeshConfig, Partitioner, make_mesh
from praxis_lite.decode import Greedy
from praxis_lite.layers import (
    SHARDING_PRESETS,
    DotProductAttention,
    MultiHeadLatentAttention,
    Transformer,
    TransformerLm,
    set_sharding_params,
)
from praxis_lite.layers.attention.kv_cache import SPARE_PLACES
from praxis_lite.tasks.language_model import LanguageModelTask
from tests.support.lm_runs import drawn_weights

V, D, H, N, K, B, P, M = 17, 12, 20, 6, 8, 5, 4, 33
S, W = P + M, 5
SPEC = {
    "ids": jax.ShapeDtypeStruct((B, P), np.int32),
    "prefix_lengths": jax.ShapeDtypeStruct((B,), np.int32),
    "weights": jax.ShapeDtypeStruct((B,), np.float32),
}


def partitioner_of(dtype, layers, shape=(1, 1, 1)):
    """Returns the partitioner of a model with a layer for each of `layers`."""
    pattern = [
        fdl.Partial(
            Transformer,
            tr_atten_tpl=fdl.Partial(
                MultiHeadLatentAttention if "kv_lora_rank" in settings else DotProductAttention,
                **settings,
            ),
        )
        for settings in layers
    ]
    lm = fdl.Partial(
        TransformerLm,
        V,
        D,
        H,
        num_heads=N,
        num_layers=len(layers),
        dim_per_head=K,
        transformer_layer_tpl=pattern,
        fprop_dtype=dtype,
    )
    batch = SHARDING_PRESETS["megatron"]["batch"]
    task = LanguageModelTask(
        fdl.build(set_sharding_params(lm, "megatron")),
        Learner(optax.sgd, 0.1),
        decoder=Greedy(max_decode_steps=M, eos_id=()),
        inputs_split_mapping={"map_1d": (batch,), "map_2d": (batch, None)},
    )
    return Partitioner(task, make_mesh(MeshConfig(ici_mesh_shape=shape)))


def made_in_loops(text, num_places):
    """Returns the operations by which loops make arrays that have keys' dims.

    These are dims of rows, places, dims of a head and any number of heads, in any order and dtype.
    Of a fusion it is the last of its operations.
    """
    computations = {
        part.split(maxsplit=1)[0]: part.splitlines() for part in re.split(r"\n(?=\S)", text)
    }
    result = []
    for name in re.findall(r" while\(.* body=(%[\w.-]+)", text):
        for line in computations[name]:
            match = re.match(r"\s+(?:ROOT )?%\S+ = \w+\[([\d,]+)\]\S* ([\w-]+)\(", line)
            if match and match[2] not in ("parameter", "get-tuple-element", "bitcast"):
                dims = [int(dim) for dim in match[1].split(",")]
                if all(dim in dims for dim in (B, num_places, K)):
                    result.append(match[2])
                if result and result[-1] == "fusion":
                    called = computations[re.search(r"calls=(%[\w.-]+)", line)[1]]
                    root = next(line for line in called if "ROOT" in line)
                    result[-1] = re.search(r" ([\w-]+)\(", root)[1]
    return result


@pytest.mark.parametrize(
    "dtype, layers",
    [
        pytest.param(
            jnp.bfloat16,
            [{"num_kv_heads": 1, "window": W}, {"num_kv_heads": 2}],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            jnp.float32,
            [{"num_kv_heads": 1}, {"num_kv_heads": 2, "window": W}, {}],
            marks=pytest.mark.nightly,
        ),
        pytest.param(jnp.bfloat16, [{"num_kv_heads": 1}, {"window": W}], marks=pytest.mark.nightly),
    ],
)
def test_the_loop_makes_no_array_of_a_caches_size_but_writes_into_it(dtype, layers):
    text = partitioner_of(dtype, layers).decode_step.lower(SPEC).compile().as_text()
    for num_places in (S, W + SPARE_PLACES):
        num_arrays = 2 * sum(("window" in layer) == (num_places != S) for layer in layers)
        # A row is written into each array; nothing is repeated for the heads that share it.
        made = made_in_loops(text, num_places)
        assert len(made) == num_arrays, made
        assert set(made) <= {"scatter", "dynamic-update-slice"}, made


LATENT = {"kv_lora_rank": 5, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4}


@pytest.mark.slow
def test_time_is_split_where_keys_have_fewer_heads_than_there_are_devices():
    layers = [{"num_kv_heads": 1}, {"num_kv_heads": 1, "window": W}, LATENT]
    batch = {
        "ids": np.arange(B * P, dtype=np.int32).reshape(B, P) % V,
        "prefix_lengths": np.asarray([4, 2, 3, 1, 4], np.int32),
        "weights": np.ones(B, np.float32),
    }
    results = []
    for shape in ((1, 1, 1), (1, 2, 2)):
        partitioner = partitioner_of(jnp.float32, layers, shape)
        weights = partitioner.for_decoding(drawn_weights(partitioner))
        program = partitioner.decode_step.lower(SPEC).compile()
        outputs = program(weights, partitioner.global_batch(batch), partitioner.key(0))
        results.append(jax.device_get(outputs))
    expected, actual = results
    assert np.ptp(expected["output_ids"]) > 0
    np.testing.assert_array_equal(actual["output_ids"], expected["output_ids"])
    np.testing.assert_allclose(actual["logprobs"], expected["logprobs"], rtol=1e-4, atol=1e-5)
    text = program.as_text()
    loops = "".join(line for line in text.splitlines() if " while(" in line)
    rows, places, ring = (-(-size // 2) for size in (B, S, W + SPARE_PLACES))
    for share in (f"{rows},1,{places},{K}", f"{rows},1,{ring},{K}", f"{rows},{places},7"):
        assert f"f32[{share}]" in loops
    # No device has all places of a row, nor gets them for a token.
    shapes = re.findall(r"f32\[([\d,]+)\]", "".join(re.findall(r".*while/body.*", text)))
    assert not {str(S), str(W + SPARE_PLACES)} & {dim for x in shapes for dim in x.split(",")}
