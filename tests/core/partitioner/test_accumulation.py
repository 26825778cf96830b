"""N microbatches are one batch: against NumPy by hand, one device, and the compiled programs."""

import functools

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from praxis_lite import ConfigError
from praxis_lite.core import AuxiliaryOptimizer, Learner, MeshConfig, Partitioner, make_mesh
from praxis_lite.core.partitioner import accumulation
from praxis_lite.layers import SharedEmbeddingSoftmax, rotary_lm, set_sharding_params
from praxis_lite.tasks.language_model import LanguageModelTask
from praxis_tools.explain import hlo, hlo_matmuls
from tests.support.lm_runs import on_host, structs, zero_padded

# A weighted regression by hand: what each microbatch gives is 0 / 0 where it weighs nothing.
ROWS, DIMS = 24, 5
RNG = np.random.default_rng(0)
DATA = {
    "x": RNG.normal(size=(ROWS, DIMS)).astype(np.float32),
    "y": RNG.normal(size=ROWS).astype(np.float32),
    "weights": RNG.integers(0, 7, ROWS).astype(np.float32),
    "offset": np.float32(0.3),
}
DATA["weights"][3::4] = 0.0  # A microbatch of 4, and two of 8, without any weight.
W = RNG.normal(size=DIMS).astype(np.float32)


def regression(fixed, params, non_trainable, inputs, key):
    weights, total = inputs["weights"], jnp.sum(inputs["weights"])
    errors = inputs["x"] @ params["w"] + inputs["offset"] - inputs["y"]
    loss = jnp.sum(jnp.square(errors) * weights) / total
    seen = {
        "mean": 0.9 * non_trainable["mean"] + 0.1 * jnp.sum(inputs["y"] * weights) / total,
        "count": non_trainable["count"] + 1,
    }
    metrics = {"loss": (loss, total), "draw": (jax.random.uniform(key), 1.0)}
    return loss, (metrics, seen)


def run(accumulation_steps, loss_fn=regression, data=DATA, w=W):
    seen = {"mean": jnp.zeros(()), "count": jnp.zeros((), jnp.int32)}

    @jax.jit
    def value_and_grad(w, data):
        return accumulation.value_and_grad(
            loss_fn,
            {},
            {"w": w},
            seen,
            data,
            jax.random.key(5),
            accumulation_steps=accumulation_steps,
        )

    return jax.device_get(value_and_grad(w, data))


@pytest.mark.parametrize("accumulation_steps", [1, 8, 24])
def test_a_weighted_loss_and_its_gradient_are_those_of_the_whole_batch(accumulation_steps):
    metrics, _, grads = run(accumulation_steps)
    x, y, weights = (DATA[name].astype(np.float64) for name in ("x", "y", "weights"))
    errors = x @ W + DATA["offset"] - y
    assert metrics["loss"][1] == weights.sum()
    np.testing.assert_allclose(metrics["loss"][0], (errors**2 @ weights) / weights.sum(), rtol=1e-6)
    gradient = 2 * (errors * weights) @ x / weights.sum()
    np.testing.assert_allclose(grads["w"], gradient, rtol=1e-5, atol=1e-6)


def test_variables_pass_from_one_microbatch_to_the_next_and_an_empty_one_leaves_no_trace():
    _, seen, _ = run(4)
    mean = 0.0
    for rows in (slice(n, None, 4) for n in range(3)):  # Row r is in microbatch r % 4.
        weights = DATA["weights"][rows]
        mean = 0.9 * mean + 0.1 * (DATA["y"][rows] @ weights) / weights.sum()
    np.testing.assert_allclose(seen["mean"], mean, rtol=1e-5)
    assert seen["count"] == 3


def test_each_microbatch_has_a_key_of_its_own():
    key = jax.random.key(5)
    draws = [float(jax.random.uniform(jax.random.fold_in(key, i))) for i in range(4)]
    assert run(4)[0]["draw"] == pytest.approx((np.mean(draws), 4.0))
    assert run(1)[0]["draw"] == pytest.approx((float(jax.random.uniform(key)), 1.0))


@pytest.mark.parametrize("guard", [0.0, 1e-6])
def test_a_batch_that_weighs_nothing_is_what_it_is_in_one_piece(guard):
    """0 / 0 is NaN, which the learner skips; a guarded mean is 0, with gradients of 0."""

    def loss_fn(fixed, params, non_trainable, inputs, key):
        total = jnp.sum(inputs["weights"])
        loss = jnp.sum(params["w"]) * total / (total + guard)
        return loss, ({"loss": (loss, total)}, non_trainable)

    data = {"weights": np.zeros(ROWS, np.float32)}
    for n in (1, 4):
        metrics, _, grads = run(n, loss_fn, data)
        assert metrics["loss"][1] == 0.0
        np.testing.assert_equal(metrics["loss"][0], 0.0 if guard else np.nan)
        np.testing.assert_array_equal(np.isnan(grads["w"]) & (n == 1), n == 1 and not guard)
        assert np.all(np.nan_to_num(grads["w"]) == 0.0)


def test_one_row_that_is_not_finite_and_weighs_spoils_the_batch():
    x = DATA["x"].copy()
    x[1] = np.inf
    assert DATA["weights"][1] > 0
    metrics, _, grads = run(4, data=DATA | {"x": x})
    assert not np.isfinite(metrics["loss"][0]) and not np.isfinite(grads["w"]).any()


def test_gradients_of_bfloat16_weights_are_summed_in_float32():
    data = {"ones": np.ones((8, 1), np.float32)}
    data["ones"][0] = 256.0

    def loss_fn(fixed, params, non_trainable, inputs, key):
        loss = jnp.sum(params["w"].astype(jnp.float32) * jnp.sum(inputs["ones"]))
        return loss, ({"loss": (loss, 1.0)}, non_trainable)

    grads = run(8, loss_fn, data, jnp.ones(3, jnp.bfloat16))[2]["w"]
    assert grads.dtype == np.float32
    np.testing.assert_array_equal(grads * 8, 263.0)  # In bfloat16 256 + 1 is 256.


def test_a_batch_that_does_not_divide_is_refused_while_tracing():
    with pytest.raises(ConfigError, match="gradient_accumulation_steps.*5.*24") as error:
        run(5)
    assert "[1, 2, 3, 4" in str(error.value)


def test_rows_that_do_not_divide_are_still_spread_over_the_devices(mesh_of):
    """3 rows of a microbatch on four devices: one each. Left to XLA each would compute all 3."""
    mesh, outputs = mesh_of(1, 4, 2), 37

    def loss_fn(fixed, params, non_trainable, inputs, key):
        loss = jnp.sum(jnp.tanh(inputs["x"] @ params["w"]))
        return loss, ({"loss": (loss, 1.0)}, non_trainable)

    def grads(w, x):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return accumulation.value_and_grad(
                loss_fn,
                {},
                {"w": w},
                {},
                {"x": x},
                jax.random.key(0),
                accumulation_steps=8,
                inputs_split_mapping={"map_2d": ("data", None)},
            )[2]

    whole, rows = (NamedSharding(mesh, P(*spec)) for spec in ((), ("data", None)))
    w, x = jax.ShapeDtypeStruct((DIMS, outputs), "f4"), jax.ShapeDtypeStruct((ROWS, DIMS), "f4")
    program = jax.jit(grads, in_shardings=(whole, rows), out_shardings=whole).lower(w, x).compile()
    of_a_row = 2 * 2 * DIMS * outputs  # Forward, and the gradient of w.
    assert of_a_row <= hlo_matmuls.flops(program) <= 8 * of_a_row


# A language model with all that adds to a loss of tokens; packed rows, empty rows, and with 4 or 8
# microbatches some without a token.
VOCAB = 37


def lm_batch(step, num_rows=ROWS, seq_len=7):
    rng = np.random.default_rng(step)
    ids = rng.integers(0, VOCAB, (num_rows, seq_len + 1)).astype(np.int32)
    starts = rng.random((num_rows, seq_len)) < 0.3
    starts[:, 0] = True
    segment_ids = np.cumsum(starts, axis=1).astype(np.int32)
    index = np.arange(seq_len)
    first = np.maximum.accumulate(np.where(starts, index, 0), axis=1)
    lengths = rng.integers(0, seq_len + 1, num_rows)
    lengths[3::4] = 0
    is_token = index < lengths[:, None]
    return {
        "ids": ids[:, :-1],
        "labels": ids[:, 1:],
        "segment_ids": np.where(is_token, segment_ids, 0),
        "segment_pos": np.where(is_token, index - first, 0).astype(np.int32),
        "weights": np.where(is_token, rng.choice([0.5, 1.0, 2.0], is_token.shape), 0.0).astype(
            np.float32
        ),
    }


def lm_partitioner(shape, accumulation_steps, is_zero1=False):
    softmax = fdl.Partial(
        SharedEmbeddingSoftmax, has_bias=False, label_smoothing_prob=0.1, z_loss_weight=1e-2
    )
    lm = rotary_lm(
        vocab_size=VOCAB,
        model_dims=13,
        hidden_dims=29,
        num_heads=3,
        dim_per_head=6,
        num_layers=2,
        softmax_tpl=softmax,
        entropy_loss_weight=0.05,
    )
    sgd = functools.partial(optax.sgd, momentum=0.9)
    learner = Learner(
        # eps above what rounding makes of a gradient of zero.
        functools.partial(optax.adamw, eps=1e-6),
        1e-3,
        clip_gradient_norm_to_value=0.5,
        auxiliary_optimizers=[AuxiliaryOptimizer("transformer/.*", sgd, 0.1, "blocks")],
        gradient_accumulation_steps=accumulation_steps,
        slot_mesh_axes=("data",) if is_zero1 else (),
    )
    preset = "megatron" if is_zero1 else "fsdp+tensor"
    task = LanguageModelTask(
        fdl.build(set_sharding_params(lm, preset)),
        learner,
        inputs_split_mapping={"map_2d": (("replica", "data"), None)},
    )
    return Partitioner(task, make_mesh(MeshConfig(ici_mesh_shape=shape)))


@functools.cache
def initial_state():
    partitioner = lm_partitioner((1, 1, 1), 1)
    return on_host(partitioner.layout, partitioner.init(partitioner.key(0)))


@functools.cache
def trained(shape, accumulation_steps, is_zero1=False):
    """Returns the weights, and the outputs of each of three steps."""
    partitioner = lm_partitioner(shape, accumulation_steps, is_zero1)
    layout, key, outputs = partitioner.layout, partitioner.key(0), []
    padded = jax.tree.map(zero_padded, initial_state(), layout.padded_shapes)
    state = jax.device_put(padded, layout.shardings(partitioner.mesh))
    for step in range(3):
        batch = partitioner.global_batch(lm_batch(step))
        state, output = partitioner.train_step(state, batch, key)
        outputs.append(jax.device_get(output))
    return on_host(layout, state).mdl_vars["params"], outputs


@pytest.mark.slow
# On (1, 4, 2), 24 rows are 6 a device: cut in 2 evenly, in 4 not (6 rows on four devices).
@pytest.mark.parametrize(
    ("shape", "accumulation_steps", "is_zero1"),
    [
        ((1, 4, 2), 4, False),
        pytest.param((1, 4, 2), 2, True, marks=pytest.mark.nightly),
    ],
)
def test_a_language_model_trains_as_with_one_batch_on_one_device(
    shape, accumulation_steps, is_zero1
):
    """Label smoothing, z-loss and entropy loss; weights by SGD and, outside the blocks, AdamW."""
    weights, outputs = trained((1, 1, 1), 1)
    new_weights, new_outputs = trained(shape, accumulation_steps, is_zero1)
    for expected, output in zip(outputs, new_outputs, strict=True):
        assert {"loss", "accuracy", "aux_loss"} < expected["metrics"].keys()
        assert output["metrics"]["loss"][1] == expected["metrics"]["loss"][1] > 0
        jax.tree.map(functools.partial(assert_near, rtol=1e-6), output, expected)
    jax.tree.map(assert_near, new_weights, weights)
    moved = jax.tree.map(
        lambda new, old: np.abs(new - old).max(), weights, initial_state().mdl_vars["params"]
    )
    assert min(jax.tree.leaves(moved)) > 1e-4


def assert_near(actual, expected, rtol=0):
    np.testing.assert_allclose(actual, expected, atol=1e-6, rtol=rtol)


@functools.cache
def on_the_mesh(accumulation_steps):
    partitioner = lm_partitioner((1, 4, 2), accumulation_steps)
    return partitioner.train_step.lower(structs(lm_batch(0, 64, 61))).compile()


@pytest.mark.slow
def test_cutting_a_batch_moves_no_row():
    """What carries whole numbers between devices is the batch: once at entry, cut or not."""

    def bytes_moved(program):
        return sum(c.bytes * c.count for c in hlo.collectives(program) if "s32" in c.dtypes)

    assert bytes_moved(on_the_mesh(8)) == bytes_moved(on_the_mesh(1)) > 0
    # Nor does any device compute another's rows.
    assert hlo_matmuls.flops(on_the_mesh(8)) == hlo_matmuls.flops(on_the_mesh(1))


@pytest.mark.slow
def test_activations_are_those_of_a_microbatch():
    whole, cut = (hlo.memory_per_device(on_the_mesh(n)).temp for n in (1, 8))
    assert cut < 0.4 * whole
