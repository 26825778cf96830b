"""Flops of models as they are written: by hand, and as XLA's compiled programs have them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from praxis_lite.config.build import build
from praxis_lite.experiment.launched_config import config_of_experiment
from praxis_lite.layers.attention.kernels.blocks import blocked_attention
from praxis_lite.layers.attention.kernels.chunks import chunked_attention
from praxis_lite.layers.attention.kernels.einsum import LogitOptions
from praxis_lite.layers.attention.masks import AttentionMask
from praxis_lite.layers.embedding.chunked_cross_entropy import token_stats
from praxis_lite.trainer.job_on_mesh import partitioner_of
from praxis_tools.explain import hlo_matmuls
from praxis_tools.utilization.model_flops import ModelFlops, flops_of_step, model_flops


def flops(function, *shapes):
    return model_flops(jax.make_jaxpr(function)(*map(jnp.ones, shapes)))


def compiled_flops(function, *shapes):
    return hlo_matmuls.flops(jax.jit(function).lower(*map(jnp.ones, shapes)).compile())


def test_a_matmul_with_batch_dims_counts_two_per_multiplication():
    actual = flops(lambda x, w: jnp.einsum("btd,bdf->btf", x, w), (3, 7, 5), (3, 5, 11))
    assert (actual.flops, actual.at_least) == (2 * 3 * 7 * 5 * 11, False)


def test_loops_count_as_often_as_they_run_and_branches_as_the_costliest():
    def scanned(x, w):
        return jax.lax.scan(lambda x, _: (x @ w, None), x, None, length=13)[0]

    def branches(x, w):
        return jax.lax.cond(x[0, 0] > 0, lambda: x @ w @ w, lambda: x @ w)

    def looped(x, w):
        return jax.lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x @ w, x)

    each = 2 * 3 * 7 * 7
    assert flops(scanned, (3, 7), (7, 7)).flops == 13 * each
    assert flops(branches, (3, 7), (7, 7)).flops == 2 * each
    actual = flops(looped, (3, 7), (7, 7))
    assert (actual.flops, actual.at_least) == (each, True)
    within = flops(jax.jit(lambda x, w: jax.lax.map(lambda x: looped(x, w), x)), (5, 3, 7), (7, 7))
    assert (within.flops, within.at_least) == (5 * each, True)


def test_what_is_computed_again_counts_once():
    def loss(w, x, wrap):
        layer = wrap(lambda x, w: jnp.tanh(x @ w))
        return jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)[0].sum()

    # A product forward, two backward: the first layer's too, though x is no variable.
    expected = 3 * 5 * 2 * 3 * 7 * 7
    for wrap in (lambda layer: layer, jax.checkpoint):
        gradient = jax.grad(lambda w, x, wrap=wrap: loss(w, x, wrap))
        assert flops(gradient, (5, 7, 7), (3, 7)).flops == expected
    assert compiled_flops(gradient, (5, 7, 7), (3, 7)) == expected + 5 * 2 * 3 * 7 * 7


def test_what_our_own_backward_passes_compute_again_counts_once():
    # T 5 queries and keys of N 2 heads with K 3, D 7, V 11.
    q = k = v = (1, 5, 2, 3)
    inner = 2 * 5 * 2 * 3  # Of the softmax's derivative, beside the six matmuls.
    given = AttentionMask(), LogitOptions(cap=9.0, zero_fully_masked=True)
    attentions = (
        lambda *qkv: chunked_attention(*qkv, *given, chunk_size=5),
        lambda *qkv: blocked_attention(*qkv, *given, block_size=5),
    )
    for attend in attentions:
        gradient = jax.grad(lambda *qkv, attend=attend: attend(*qkv).sum(), (0, 1, 2))
        assert flops(gradient, q, k, v).flops == 6 * 2 * 5 * 5 * 2 * 3 + inner

    def loss(x, w):
        return token_stats([(x, w)], None, jnp.zeros(13, int), chunk_size=11).log_z.sum()

    assert flops(jax.grad(loss, (0, 1)), (13, 7), (7, 11)).flops == 3 * 2 * 13 * 7 * 11


@pytest.mark.slow
def test_a_step_counts_what_its_model_needs_whatever_the_mesh_and_the_optimizer():
    # By hand: 16 rows of 32 tokens, D 32, ffn 64, 4 heads of 8, 61 classes; two layers.
    tokens = 16 * 32
    attention = 4 * tokens * 32 * 32 + 2 * tokens * 32 * 32
    ffn, logits = 2 * tokens * 32 * 64, tokens * 32 * 61
    dense = 3 * 2 * (2 * (attention + ffn) + logits)
    # Two of four experts for each token, the choice of them, and the sum of both.
    experts = 3 * 2 * (ffn + tokens * 32 * 4 + tokens * 2 * 32)
    for exp, setting, expected in (
        ("pipelined.Synthetic", "task.learner.optimizer=muon", dense),  # It has idle stages.
        ("moe.Synthetic", "task.learner.gradient_accumulation_steps=2", dense + experts),
    ):
        launched = config_of_experiment(exp, [setting])
        job = build(launched.config)
        actual = flops_of_step(partitioner_of(job, "train"), job.datasets["train"].element_spec())
        assert actual == ModelFlops(expected, False)


def test_groups_of_rows_count_each_row_once():
    sizes = np.array([2, 4, 7])

    def loss(x, w):
        return jax.lax.ragged_dot(x, w, sizes).sum()

    assert flops(loss, (13, 5), (3, 5, 11)).flops == 2 * 13 * 5 * 11
    assert flops(jax.grad(loss, (0, 1)), (13, 5), (3, 5, 11)).flops == 3 * 2 * 13 * 5 * 11


@pytest.mark.parametrize("stride", [1, 2])
def test_convolutions_count_as_in_the_compiled_program(stride):
    def loss(x, w):
        return jnp.square(
            jax.lax.conv_general_dilated(
                x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
        ).sum()

    shapes = (2, 9, 11, 3), (3, 3, 3, 5)
    for function in (loss, jax.grad(loss, (0, 1))):
        assert flops(function, *shapes).flops == compiled_flops(function, *shapes)


def test_each_device_of_a_shard_map_counts_its_part():
    mesh = jax.make_mesh((4, 2), ("data", "mdl"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    split = jax.shard_map(
        lambda x, w: x @ w,
        mesh=mesh,
        in_specs=(P("data"), P(None, "mdl")),
        out_specs=P("data", "mdl"),
    )
    assert flops(split, (8, 7), (7, 6)).flops == 2 * 8 * 7 * 6
    partly = jax.shard_map(
        lambda x, w: x @ w,
        mesh=mesh,
        in_specs=(P("data"), P()),
        out_specs=P("data"),
        axis_names={"data"},
    )
    assert flops(jax.jit(partly), (8, 7), (7, 6)).flops == 2 * 8 * 7 * 6
