"""Explicit collectives: the notebook's golden, NumPy by hand, bare JAX, and the compiled steps."""

import functools
import re

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from praxis_lite import ConfigError
from praxis_lite.core import (
    Learner,
    MeshConfig,
    Partitioner,
    make_mesh,
)
from praxis_lite.core.collectives.explicit_collectives import mean_change, on_each_device
from praxis_lite.core.collectives.mapped_weights import gather_of
from praxis_lite.experiments import explicit
from praxis_lite.layers import Repeat
from praxis_lite.layers.attention.kernels import fused as attention_fused
from praxis_lite.layers.embedding import chunked_cross_entropy
from praxis_lite.layers.moe import experts as moe_experts
from praxis_lite.layers.stacking.pipelining import ticks as pipeline_ticks
from praxis_lite.models import FunctionModel
from praxis_lite.optimizers import DynamicLossScale
from praxis_lite.tasks.language_model import LanguageModelTask
from praxis_lite.tasks.loss import LossTask
from praxis_tools.explain import hlo
from tests.support import lm_runs
from tests.support.explicit_partitioner import explicit_partitioner
from tests.support.goldens import golden, trimmed
from tests.support.lm_runs import on_host, structs
from tests.support.marks import slow_but

# ---- The notebook.

NUM_STEPS = 16


def notebook(experiment):
    """Returns the notebook's job as its golden has it: float32, no dropout."""
    config = experiment().config()
    config.task.model.module.dropout_rate = 0.0
    config.task.model.module.dtype = jnp.float32
    job = fdl.build(config)
    return job.partitioner(job.task, make_mesh(job.mesh))


@functools.cache
def notebook_partitioner(name):
    return notebook({"dp": explicit.NotebookDp, "fsdp": explicit.NotebookFsdp}[name])


@functools.cache
def notebook_run(name):
    partitioner = notebook_partitioner(name)
    inputs = explicit.random_rows()
    compiled = partitioner.train_step.lower(structs(inputs)).compile()
    # The golden splits its key 42 in three, the first for the model, and that in two.
    key = jax.device_put(
        jax.random.split(jax.random.split(jax.random.key(42), 3)[0])[0], partitioner.replicated
    )
    state, batch, metrics = partitioner.init(key), partitioner.global_batch(inputs), []
    for _ in range(NUM_STEPS):
        state, outputs = compiled(state, batch, key)
        metrics.append(jax.device_get(outputs["metrics"]))
    return partitioner, compiled, metrics, jax.device_get(state.mdl_vars["params"])


@pytest.mark.parametrize("name", slow_but({"dp"}, ["dp", "fsdp"]))
def test_the_notebooks_losses_and_accuracies(name):
    expected = golden("reference/shard_map_dp_fsdp.json")
    assert expected["steps"] == NUM_STEPS
    metrics = notebook_run(name)[2]
    losses = [float(m["loss"][0]) for m in metrics]
    np.testing.assert_allclose(losses, expected[name]["losses"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(losses, expected["single"]["losses"], rtol=0, atol=1e-5)
    assert [float(m["accuracy"][0]) for m in metrics] == expected[name]["accs"]
    assert {float(m["loss"][1]) for m in metrics} == {128.0}


@pytest.mark.parametrize("name", ["dp", "fsdp"])
def test_the_notebooks_shardings_and_bytes_per_device(name):
    wanted = golden("reference/shard_map_dp_fsdp.json")
    leaves = list(notebook_partitioner(name).layout.leaves())
    params = {x.path.removeprefix("mdl_vars/params/"): x for x in leaves if "params/" in x.path}
    shards = wanted[name]["shard"]
    assert {path: list(x.shape) for path, x in params.items()} == {
        path: shard["shape"] for path, shard in shards.items()
    }
    assert {path: trimmed(x.spec) for path, x in params.items()} == {
        path: item["spec"] for path, item in shards.items()
    }
    assert {sum(x.bytes_per_device for x in params.values())} == set(wanted[name]["mem"]["params"])
    slots = {x.path.split("unstacked/")[1]: x for x in leaves if "/slots/" in x.path}
    slot_bytes = sum(x.bytes_per_device for x in slots.values())
    assert {slot_bytes} == set(wanted[name]["mem"]["opt_state"])
    if name == "fsdp":
        actual = {path: trimmed(x.spec) for path, x in slots.items()}
        assert actual == wanted["fsdp_opt_specs"]


@pytest.mark.slow
def test_the_notebooks_weights_are_the_same_in_both_forms():
    # Adam divides by roots of squares near 0, so roundings of the sums show in its first steps.
    differences = golden("reference/shard_map_dp_fsdp.json")["param_maxdiff_fsdp_vs_dp"]
    actual = [jax.tree.leaves(notebook_run(name)[3]) for name in ("dp", "fsdp")]
    for dp, fsdp in zip(*actual, strict=True):
        assert np.abs(dp - fsdp).max() <= 2 * max(differences.values())


def sent(collectives):
    """Returns (kind, bytes of one) for each execution, in order of size."""
    return sorted((c.kind, c.bytes) for c in collectives for _ in range(c.count))


def bytes_of(shape):
    """Returns the bytes of an HLO shape of 4-byte elements: 'f32[98,512]', '(s32[], f32[10])'."""
    dims = re.findall(r"\[([\d,]*)\]", shape)
    return sum(4 * int(np.prod([int(n) for n in d.split(",") if n])) for d in dims)


@pytest.mark.parametrize("name", slow_but({"dp"}, ["dp", "fsdp"]))
def test_the_notebooks_collectives(name):
    """Equal but for the learner's gradient norm, and how XLA bundles the sums over all devices.

    The notebook's loop over microbatches is unrolled and XLA merges the gathers of one weight;
    ours is a scan, out of which XLA takes them. Scatters are executed once per microbatch in both.
    """
    lines = golden("reference/shard_map_dp_fsdp.json")[name]["collective_lines"]
    expected = sorted((kind, bytes_of(shape)) for kind, shape in lines)
    actual = sent(hlo.collectives(notebook_run(name)[1]))

    def no_sums(pairs):
        return [pair for pair in pairs if pair[0] != "all-reduce"]

    def summed(pairs):
        return sum(size for kind, size in pairs if kind == "all-reduce")

    assert no_sums(actual) == no_sums(expected)
    # A square sum for each of the three weights in blocks; whole ones need none.
    norm = {"dp": 0, "fsdp": 3 * 4}[name]
    assert summed(actual) == summed(expected) + norm
    assert len(actual) - len(no_sums(actual)) <= 2


# ---- NumPy by hand: a regression that neither devices nor microbatches divide.

ROWS, DIMS = 11, 13
RNG = np.random.default_rng(0)
DATA = {
    "x": RNG.normal(size=(ROWS, DIMS)).astype(np.float32),
    "y": RNG.normal(size=ROWS).astype(np.float32),
    "weights": RNG.integers(1, 5, ROWS).astype(np.float32),
}
DATA["weights"][2:6] = 0.0  # Of 8 devices with 2 rows each, two have no weight and two no row.


def init(key):
    return {
        "w": jnp.cos(jnp.arange(DIMS, dtype=jnp.float32)),
        "bias": jnp.full((1,), 0.3),
        "kept": jnp.ones((DIMS,)),
    }


def regression(params, inputs, key):
    """Its mean over no weight is 0 / 0."""
    weights = inputs["weights"]
    errors = inputs["x"] @ (params["w"] * params["kept"]) + params["bias"] - inputs["y"]
    draw = jnp.zeros(()) if key is None else jax.random.uniform(key)
    loss = jnp.sum(jnp.square(errors) * weights) / jnp.sum(weights)
    return loss, {"draw": (draw, jnp.ones(()))}


def regression_partitioner(partitioner=explicit_partitioner, accumulation_steps=2, **learner):
    split = P("data")
    model = FunctionModel(init, specs={"w": split, "bias": None, "kept": split})
    task = LossTask(
        model,
        regression,
        Learner(
            optax.sgd,
            0.1,
            gradient_accumulation_steps=accumulation_steps,
            bprop_variable_exclusion="kept",
            **learner,
        ),
    )
    return partitioner(task, make_mesh(MeshConfig(ici_mesh_shape=(8,), axis_names=("data",))))


@functools.cache
def regression_step():
    partitioner = regression_partitioner(loss_scale=DynamicLossScale(initial_scale=2.0**10))
    key, batch = partitioner.key(3), partitioner.global_batch(DATA)
    state, outputs = partitioner.train_step(partitioner.init(key), batch, key)
    evaluated = partitioner.eval_step(state.mdl_vars, batch)
    params = on_host(partitioner.layout, state).mdl_vars["params"]
    return params, jax.device_get(outputs), jax.device_get(evaluated)


def by_hand(w, bias):
    """Returns the weighted loss and its gradients."""
    x, y, weights = (DATA[name].astype(np.float64) for name in ("x", "y", "weights"))
    errors, total = x @ w + bias - y, weights.sum()
    scaled = 2 * errors * weights / total
    return (errors**2 @ weights) / total, scaled @ x, scaled.sum()


def test_a_step_on_rows_that_nothing_divides_is_that_of_one_device():
    """Blocks of padded weights, frozen ones, a scaled loss, devices whose mean would be NaN."""
    params, outputs, evaluated = regression_step()
    w = np.cos(np.arange(DIMS))
    loss, w_grad, bias_grad = by_hand(w, 0.3)
    np.testing.assert_allclose(outputs["metrics"]["loss"][0], loss, rtol=1e-6)
    assert outputs["metrics"]["loss"][1] == DATA["weights"].sum()
    np.testing.assert_allclose(params["w"], w - 0.1 * w_grad, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(params["bias"], [0.3 - 0.1 * bias_grad], rtol=1e-5)
    np.testing.assert_array_equal(params["kept"], np.ones(DIMS))
    loss = by_hand(params["w"], params["bias"][0])[0]
    np.testing.assert_allclose(evaluated["loss"], (loss, DATA["weights"].sum()), rtol=1e-6)


def test_each_device_and_microbatch_has_a_key_of_its_own():
    key, draws = jax.random.fold_in(jax.random.key(3), 0), []  # The step's key.
    for row in np.flatnonzero(DATA["weights"]):  # What a device without weight draws is not seen.
        folded = jax.random.fold_in(jax.random.fold_in(key, row // 2), row % 2)
        draws.append(float(jax.random.uniform(folded)))
    actual = regression_step()[1]["metrics"]["draw"]
    assert actual == pytest.approx((np.mean(draws), len(draws)))


def test_rows_that_fill_up_a_batch_reach_no_gradient():
    """Neither as a term nor as 0 x NaN: of a direction, y / |y|, a row of zeros has none."""

    def loss(params, inputs, key):
        y = inputs["x"] @ params["w"]
        directions = y / jnp.linalg.norm(y, axis=1, keepdims=True)
        weights = inputs["weights"]
        return jnp.sum((directions @ jnp.array([1.0, -2.0, 3.0])) * weights) / jnp.sum(weights)

    x = RNG.normal(size=(7, DIMS)).astype(np.float32)
    model = FunctionModel(lambda key: {"w": jnp.sin(jnp.arange(DIMS * 3.0)).reshape(DIMS, 3)})
    task = LossTask(model, loss, Learner(optax.sgd, 0.1, gradient_accumulation_steps=1))
    norms = []
    for devices, partitioner in ((1, Partitioner), (4, Partitioner), (4, explicit_partitioner)):
        mesh = make_mesh(MeshConfig(ici_mesh_shape=(devices,), axis_names=("data",)))
        compiled = partitioner(task, mesh)
        key = compiled.key(0)
        batch = compiled.global_batch({"x": x, "weights": np.ones(7, np.float32)})
        _, outputs = compiled.train_step(compiled.init(key), batch, key)
        norms.append(float(outputs["learner"]["grad_norm"]))
    np.testing.assert_allclose(norms, norms[0], rtol=1e-5)


# ---- Statistics.


class Seen(nnx.Module):
    """Keeps a running mean, a count of passes, and what never changes."""

    def __init__(self, rngs):
        self.w = nnx.Param(jnp.zeros((1, 3)))
        self.mean = nnx.BatchStat(jnp.full((3,), 2.0))
        self.passes = nnx.BatchStat(jnp.zeros((), jnp.int32))
        self.limit = nnx.BatchStat(jnp.array([0.1, -jnp.inf]))

    def __call__(self, x):
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * jnp.mean(x, axis=0)
        self.passes[...] += 1
        return x + self.w[...]


def test_running_statistics_are_the_mean_of_the_devices():
    def loss(model, inputs, key):
        return jnp.mean(jnp.square(model(inputs["x"])), axis=1)

    task = LossTask(Seen, loss, Learner(optax.sgd, 0.1, gradient_accumulation_steps=2))
    mesh = make_mesh(MeshConfig(ici_mesh_shape=(4,), axis_names=("data",)))
    partitioner = explicit_partitioner(task, mesh)
    x, weights = RNG.normal(size=(7, 3)).astype(np.float32), np.ones(7, np.float32)
    key = partitioner.key(0)
    batch = partitioner.global_batch({"x": x, "weights": weights})
    state, _ = partitioner.train_step(partitioner.init(key), batch, key)
    actual = jax.device_get(state.mdl_vars["non_trainable"])
    # A row per device and microbatch; the last of the eight is padding, its pass no change.
    means, rows = np.full((4, 3), 2.0), np.concatenate([x, np.zeros((1, 3), np.float32)])
    for device, n in np.ndindex(4, 2):
        if 2 * device + n < 7:
            means[device] = 0.9 * means[device] + 0.1 * rows[2 * device + n]
    expected = np.average(means, axis=0, weights=[2, 2, 2, 1])
    np.testing.assert_allclose(actual["mean"], expected, rtol=1e-6)
    assert actual["passes"] == 2
    np.testing.assert_array_equal(actual["limit"], np.float32([0.1, -np.inf]))


def test_keys_and_counts_that_a_step_changes_are_replicated_afterwards():
    old = {"key": jax.random.key(3), "count": jnp.int32(4)}

    @jax.jit
    def changed(x):
        def on_device(x):
            number = x[0] * 0 + 5  # Equal on all devices, which its type does not tell.
            new = {"key": jax.random.fold_in(old["key"], number), "count": number}
            return mean_change(old, new, jnp.float32(1.0), ("data",))

        mesh = make_mesh(MeshConfig(ici_mesh_shape=(8,), axis_names=("data",)))
        return jax.shard_map(on_device, mesh=mesh, in_specs=P("data"), out_specs=P())(x)

    actual = changed(jnp.arange(8))
    assert actual["count"] == 5
    expected = jax.random.fold_in(old["key"], 5)
    np.testing.assert_array_equal(*map(jax.random.key_data, (actual["key"], expected)))


# ---- A language model of the library's layers: FSDP by hand, tensor parallel by the compiler.


@functools.cache
def lm_run():
    like = lm_runs.partitioner_of("uneven", "adamw", (1, 4, 2)).task
    learner = Learner(
        optax.adamw,
        lm_runs.LEARNING_RATE,
        clip_gradient_norm_to_value=lm_runs.MAX_NORM,
        gradient_accumulation_steps=2,
    )
    task = LanguageModelTask(
        lm_runs.lm_of("uneven"), learner, inputs_split_mapping=like.inputs_split_mapping
    )
    mesh = make_mesh(MeshConfig(ici_mesh_shape=(1, 4, 2)))
    partitioner = explicit_partitioner(task, mesh)
    batches = lm_runs.batches("uneven")
    traced = partitioner.train_step.lower(structs(batches[0]))
    compiled, key, losses = traced.compile(), partitioner.key(0), []
    state = partitioner.init(key)
    for batch in batches:
        state, outputs = compiled(state, partitioner.global_batch(batch), key)
        losses.append(float(outputs["metrics"]["loss"][0]))
    return partitioner, compiled, losses


@pytest.mark.slow
def test_a_language_model_trains_as_in_bare_jax_on_one_device():
    losses = lm_run()[2]
    expected = lm_runs.plain("uneven", "adamw")[1]
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_all_of_the_donated_state_is_reused():
    partitioner, compiled, _ = lm_run()
    stored = sum(x.bytes_per_device for x in partitioner.layout.leaves())
    assert hlo.donated_bytes(compiled) == stored


@pytest.mark.slow
def test_each_layer_gathers_and_scatters_its_own_weights_and_nothing_more():
    """By hand along `data`, a weight's part along `mdl` at a time: the compiler keeps it split."""
    partitioner, compiled, _ = lm_run()
    actual = [c for c in hlo.collectives(compiled) if c.group_size == 4]
    gathered, scattered = [], []
    for weight in partitioner.layout.leaves():
        if "mdl_vars/params/transformer" not in weight.path or "data" not in weight.spec:
            continue
        # One of two layers; whole along data's 4 devices, split along mdl's where it was.
        block = weight.bytes_per_device // 2
        # Forward, and again in the backward pass, of 2 layers, in 2 microbatches. The last bias
        # is added, and nothing but its own gradient asks for it.
        num_passes = 1 if "ffn_layer2/bias" in weight.path else 2
        gathered += [("all-gather", 4 * block)] * num_passes * 2 * 2
        scattered += [("reduce-scatter", block)] * 2 * 2
    in_layers = [c for c in actual if "/blocks/" in c.op_name]
    assert gathered and sent(in_layers) == sorted(gathered + scattered)
    # Sums over devices are of what lies whole: once a step, not once per microbatch.
    sums = [c for c in actual if c.kind == "all-reduce"]
    whole = [
        x.bytes_per_device
        for x in partitioner.layout.leaves()
        if "mdl_vars/params" in x.path and "data" not in x.spec
    ]
    scalars = 4 * (4 + 2 * len(list(partitioner.layout.leaves())))
    assert {c.count for c in sums} == {1}
    assert sum(c.bytes for c in sums) <= sum(whole) + scalars


def test_gradients_of_microbatches_are_summed_over_devices_once():
    """The compiler alone sums them once per microbatch; a ratio of four for four."""

    def wide(key):
        return {"w": jnp.ones((DIMS, 257))}

    def loss(params, inputs, key):
        return jnp.mean(jnp.square(inputs["x"] @ params["w"]), axis=1)

    def summed_bytes(partitioner):
        learner = Learner(optax.sgd, 0.1, gradient_accumulation_steps=4)
        task = LossTask(FunctionModel(wide), loss, learner)
        mesh = make_mesh(MeshConfig(ici_mesh_shape=(8,), axis_names=("data",)))
        spec = {"x": jax.ShapeDtypeStruct((32, DIMS), np.float32)}
        compiled = partitioner(task, mesh).train_step.lower(spec).compile()
        return sum(c.bytes * c.count for c in hlo.collectives(compiled) if c.kind == "all-reduce")

    gradient = DIMS * 257 * 4
    assert 0 < summed_bytes(explicit_partitioner) - gradient < 64
    assert 0 < summed_bytes(Partitioner) - 4 * gradient < 256


# ---- What is refused, before anything compiles.


def refused(match, **settings):
    mesh_shape, specs = settings.pop("mesh_shape", (4, 2)), settings.pop("specs", None)
    model = FunctionModel(lambda key: {"a": {"w": jnp.ones((16, 8))}}, specs=specs)
    task = LossTask(model, regression, Learner(optax.sgd, 0.1))
    mesh = make_mesh(MeshConfig(ici_mesh_shape=mesh_shape, axis_names=("data", "mdl")))
    with pytest.raises(ConfigError, match=match):
        explicit_partitioner(task, mesh, **settings)


def test_data_axes_are_axes_of_the_mesh():
    refused(
        r"\('dat',\); .* \('data', 'mdl'\), without duplicates. Did you mean data",
        data_axes=("dat",),
    )
    refused("expected one or more of the mesh axes", data_axes=())
    refused("without duplicates", data_axes=("data", "data"))
    refused(r"data_axes \('data',\) have only one device.*gradients", mesh_shape=(1, 2))


def test_a_dim_is_split_by_hand_or_by_the_compiler():
    refused(
        r"a/w: dim 0 of \(16, 8\) is split over \('data', 'mdl'\)",
        specs=P(("data", "mdl")),
    )


def test_layers_of_a_stack_are_not_split_by_hand():
    stack = fdl.Partial(Repeat, stack_split="replica")
    model = lm_runs.lm_with({**lm_runs.SIZES["uneven"], "stacked_transformer_tpl": stack})
    task = LanguageModelTask(model, Learner(optax.sgd, 0.1))
    mesh = make_mesh(MeshConfig(ici_mesh_shape=(2, 2, 1)))
    explicit_partitioner(task, mesh)
    with pytest.raises(ConfigError, match=r"transformer/blocks.*dim 0 of \(2"):
        explicit_partitioner(task, mesh, data_axes=("replica", "data"))
    # A foreign stack shows only when it reads one layer.
    gather = gather_of("blocks/w", (6, 5), P("data", None), ("data",), {"data": 2})
    with pytest.raises(ConfigError, match=r"blocks/w.*0.*\(6.*5\).*\('data',\)"):
        gather(jnp.ones((5,)))


def test_rows_that_do_not_divide_need_weights():
    partitioner = regression_partitioner()
    spec = structs(DATA)
    partitioner.train_step.check_batch(spec)
    del spec["weights"]
    with pytest.raises(ConfigError, match="11.*8.*'weights'.*16"):
        partitioner.train_step.check_batch(spec)
    with pytest.raises(ConfigError, match="11 .*8 .* 1 .* 8,"):
        partitioner.eval_step.check_batch(spec)
    partitioner.decode_step.check_batch(spec)
    partitioner.train_step.check_batch({"x": jax.ShapeDtypeStruct((16, DIMS), np.float32)})


def test_a_constraint_over_a_data_axis_is_named():
    def loss(params, inputs, key):
        x = jax.lax.with_sharding_constraint(inputs["x"], P("data"))
        return jnp.mean(x @ params["w"][:, None], axis=1)

    task = LossTask(FunctionModel(init), loss, Learner(optax.sgd, 0.1))
    mesh = make_mesh(MeshConfig(ici_mesh_shape=(4, 2), axis_names=("data", "mdl")))
    with pytest.raises(ConfigError, match=r"data_axes"):
        explicit_partitioner(task, mesh).train_step.trace(structs(DATA))


# ---- What crosses devices in a loss is checked by JAX.


def test_a_loss_over_pairs_of_rows_of_all_devices_has_the_gradients_of_one_device():
    """It gathers over both axes; unchecked, its gradient was 0.49 long and not 1.11, silently."""

    def pairs(w, x, of_all):
        y = jnp.tanh(x @ w)
        return jnp.mean(jnp.square(y @ of_all(y).T))

    def loss(params, inputs, key):
        w, x, axes = params["w"], inputs["x"], ("data", "mdl")
        if not jax.sharding.get_abstract_mesh().manual_axes:
            return pairs(w, x, lambda y: y)

        @jax.checkpoint
        def on_a_device(w, x):
            gathered = functools.partial(jax.lax.all_gather, axis_name=axes, tiled=True)
            return jax.lax.pmean(pairs(w, x, gathered), axes)

        return jax.shard_map(
            on_a_device, in_specs=(P(), P("mdl")), out_specs=P(), axis_names={"mdl"}
        )(w, x)

    task = LossTask(
        FunctionModel(lambda key: {"w": jnp.cos(jnp.arange(15.0).reshape(5, 3))}),
        loss,
        Learner(optax.sgd, 0.1),
    )
    mesh = make_mesh(MeshConfig(ici_mesh_shape=(4, 2), axis_names=("data", "mdl")))
    rows = np.random.default_rng(0).normal(size=(8, 5)).astype(np.float32)
    norms = []
    for item in (Partitioner(task, mesh), explicit_partitioner(task, mesh)):
        key = item.key(0)
        _, outputs = item.train_step(item.init(key), item.global_batch({"x": rows}), key)
        norms.append(float(outputs["learner"]["grad_norm"]))
    np.testing.assert_allclose(norms, 1.1075836, rtol=1e-5)


def test_a_sum_that_leaves_an_axis_out_is_refused():
    """Each half of `mdl` works on the same rows: its gradient would be doubled."""
    mesh = make_mesh(MeshConfig(ici_mesh_shape=(4, 2), axis_names=("data", "mdl")))

    def on_a_device(inputs):
        loss = jnp.mean(jax.lax.all_gather(inputs["x"], ("data", "mdl")))
        return jax.lax.pmean(loss, "data")

    with jax.set_mesh(mesh), pytest.raises(ValueError, match="{mdl}"):
        run = functools.partial(on_each_device, on_a_device, out=P(), data_axes=("data", "mdl"))
        jax.eval_shape(run, {"x": jnp.ones((8, 3))})


# ---- Layers that place things themselves.


@pytest.mark.parametrize("by_hand", [("data",), ("data", "mdl")])
def test_layers_leave_the_axes_that_are_taken_by_hand_alone(mesh_of, by_hand):
    """Kernels, experts, chunked classes, pipelines: each asks the mesh itself what splits what."""
    axes, seen = ("data", "mdl"), {}
    left = tuple(axis for axis in axes if axis not in by_hand)

    def kernel(q, k, v):
        seen["q"] = q.shape
        return q

    def on_a_device(x):
        seen["experts"] = moe_experts.first_axes((axes, None))
        seen["classes"] = chunked_cross_entropy.num_shards_of(axes)
        x = pipeline_ticks.StageLayout("replica", (axes,)).constrain(x, row_dim=1)
        return attention_fused.per_device(kernel, x, x, x, (), ("data", None, "mdl", None))

    with jax.set_mesh(mesh_of(1, 4, 2)):
        mapped = jax.shard_map(
            on_a_device,
            in_specs=P("data"),
            out_specs=P("data"),
            axis_names=set(by_hand),
        )
        assert jax.eval_shape(mapped, jnp.ones((12, 5, 4, 2))).shape == (12, 5, 4, 2)
    assert seen == {
        "q": (3, 5, 4 // 2 ** len(left), 2),
        "experts": left,
        "classes": 2 ** len(left),
    }
