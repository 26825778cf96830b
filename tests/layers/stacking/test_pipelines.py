"""A pipeline computes what a Repeat computes: outputs, gradients, training, on every mesh."""

import functools

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from praxis_lite import ConfigError
from praxis_lite.core import Learner, MeshConfig, NnxModel, Partitioner, make_mesh
from praxis_lite.core.models.nnx_model import mdl_vars_of
from praxis_lite.decode import Greedy
from praxis_lite.experiments import lm
from praxis_lite.experiments import pipelined as pipelined_experiments
from praxis_lite.layers import (
    AuxLoss,
    BaseLayer,
    Pipeline,
    Repeat,
    Summary,
    Transformer,
    TransformerFeedForwardMoe,
    intermediates,
)
from praxis_lite.layers.base.base_layer import zeros
from praxis_lite.layers.stacking.pipelines import to_repeated
from praxis_lite.layers.stacking.pipelining.pipeline_schedules import Schedule
from praxis_tools.explain import hlo, hlo_runs, hlo_text
from tests.layers.stacking.pipeline_cases import (
    CASES,
    IN_TICKS,
    MESH_AXES,
    Block,
    assert_trees_close,
    data,
    drawn,
    from_case,
    from_repeated,
    on_mesh,
    pipeline_model,
    pipelined,
    program,
    repeat_model,
    repeated,
    replicated,
)
from tests.support.marks import nightly_but, slow_but

# R repeats, S stages, P layers of one stage in one repeat, M microbatches.


@pytest.mark.parametrize("case", slow_but({"circular_uneven"}, IN_TICKS))
def test_ticks_equal_a_repeat_in_outputs_and_gradients(case):
    assert_trees_close(pipelined(case), repeated(case)[1], rtol=1e-4, atol=1e-5)


# "gpipe_uneven" has three stages on two devices, 5 rows of a microbatch, 7 dims, 11 hidden dims.
ON_MESH = {
    "gpipe": {},
    "gpipe_uneven": {},
    "circular_waiting": {},
    "circular_waiting streamed": {"stream_io": True},
}


@pytest.mark.parametrize("name", slow_but({"gpipe_uneven"}, ON_MESH))
def test_on_a_mesh_it_gives_the_same(name):
    case = name.split()[0]
    actual, _ = on_mesh(case, **ON_MESH[name])
    assert_trees_close(actual, repeated(case)[1], rtol=1e-4, atol=1e-5)


# test_split_backward.py counts them for a backward pass in two parts in `make test`, and has more
# sizes of pipelines.
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ON_MESH if "uneven" not in name])
def test_stages_hand_on_by_one_collective_permute_per_tick_and_direction(name):
    case = name.split()[0]
    repeats, stages, _, microbatches, *_ = CASES[case]
    num_ticks = Schedule(stages, microbatches, repeats).num_ticks
    assert num_ticks == repeats * microbatches + stages - 1
    _, compiled = on_mesh(case, **ON_MESH[name])
    in_loops = [collective for collective in hlo.collectives(compiled) if collective.count > 1]
    permutes = [loop.count for loop in in_loops if loop.kind == "collective-permute"]
    # Forward and backward; a stream of microbatches moves by another.
    assert permutes == [num_ticks] * (4 if "streamed" in name else 2)
    # Nothing is brought together: weights, inputs and microbatches stay on their stages.
    assert {item.kind for item in in_loops} == {"collective-permute", "all-reduce"}
    assert all(element.group_size == 2 for element in in_loops if element.kind == "all-reduce")


@pytest.mark.parametrize("name", slow_but({"circular_waiting"}, ["gpipe", "circular_waiting"]))
def test_the_compiled_loops_run_as_many_ticks_as_the_formula_says(name):
    repeats, stages, per_stage, microbatches, *_ = CASES[name]
    parsed = hlo_text.parse(on_mesh(name)[1])
    trips = {
        hlo_runs.trip_count(parsed, site.computation, site.instruction)
        for site in hlo_runs.executed(parsed)
        if site.instruction.opcode == "while" and not site.scope
    }
    assert trips == {repeats * microbatches + stages - 1}


@pytest.mark.slow
def test_what_is_computed_again_changes_nothing():
    actual = pipelined("circular", checkpoint_policy="save_dot_only")
    assert_trees_close(actual, pipelined("circular"), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_dropout_is_the_same_in_ticks_and_in_a_row_and_another_per_layer_and_microbatch():
    case, key = "circular_waiting", jax.random.key(5)
    params = from_case(repeated(case)[0], case)
    # Equal layers and equal rows: only the masks differ.
    params = jax.tree.map(lambda w: jnp.broadcast_to(w[:1, :1, :1], w.shape), params)
    given = {name: jnp.broadcast_to(a[:1], a.shape) for name, a in data(case).items()}
    ticks = jax.jit(program(pipeline_model(case), key=key))(params, given)
    module = pipeline_model(case, pipelined=False).module({"params": params, "non_trainable": {}})
    given["scale"] = 0.7
    row = jax.jit(lambda module, given: module(**given, key=key)[0])(module, given)
    np.testing.assert_allclose(ticks["outputs"], row, rtol=1e-4, atol=1e-5)
    assert len({item.tobytes() for item in np.asarray(row)}) == len(row)
    grads = np.asarray(to_repeated(ticks["params"])["blocks"]["w"])
    assert len({layer.tobytes() for layer in grads}) == len(grads)


class Statistics(BaseLayer):
    """Assigns every kind of variable: [layers] of what it sees."""

    def __init__(self, *, rngs):
        self.w = self.weight((), init=zeros, rngs=rngs)
        self.mean = nnx.BatchStat(jnp.zeros((2,)))
        self.num_passes = nnx.BatchStat(jnp.zeros((), jnp.int32))
        self.untouched = nnx.BatchStat(jnp.full((), 0.1))
        self.spread = AuxLoss(jnp.zeros(()))
        self.largest = Summary(jnp.zeros(()))

    def __call__(self, x, *, key=None, cache=None, **_):
        self.mean.set_value(0.9 * self.mean[...] + 0.1 * jnp.mean(x, axis=0))
        self.num_passes.set_value(self.num_passes[...] + 1)
        self.spread.set_value(jnp.var(x))
        self.largest.set_value(jnp.max(x))
        return x * self.w[...], cache


@pytest.mark.parametrize("pipelined", [True, False, "on a mesh"], ids=["ticks", "row", "mesh"])
def test_assigned_variables_are_the_mean_over_the_microbatches_of_each_layer(pipelined):
    w, rng = np.array([2.0, -3.0, 0.5, 1.5, -1.0, 3.0], np.float32), np.random.default_rng(6)
    x, old = rng.normal(size=(9, 2)).astype(np.float32), rng.normal(size=(6, 2)).astype(np.float32)
    model = NnxModel(
        lambda rngs: Pipeline(
            Statistics,
            6,
            num_stages=2,
            num_microbatches=3,
            circular_repeat=3,
            pipelined=None if pipelined == "on a mesh" else pipelined,
            rngs=rngs,
        )
    )
    mesh = make_mesh(MeshConfig(ici_mesh_shape=(2, 2, 2), axis_names=MESH_AXES))

    @jax.jit
    def run(w, old, x):
        stats = {
            "mean": old,
            "num_passes": jnp.full(6, 4),
            "untouched": jnp.full(6, 0.1, jnp.float32),
        }
        mdl_vars = {"params": {"blocks": {"w": w}}, "non_trainable": {"blocks": stats}}
        module = model.module(from_repeated(mdl_vars, num_stages=2, circular_repeat=3))
        if pipelined == "on a mesh":
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                module(x, key=jax.random.key(0))
        else:
            module(x, key=jax.random.key(0))
        result = mdl_vars_of(module)["non_trainable"]["blocks"]
        for kind in (AuxLoss, Summary):
            result |= {p.split("/")[1]: a for p, a in intermediates(module, kind).items()}
        return to_repeated(result)

    actual = run(*replicated(mesh, (w, old, x)) if pipelined == "on a mesh" else (w, old, x))
    # Microbatch m has the rows m, m + 3, m + 6.
    x_M = x.reshape(3, 3, 2).swapaxes(0, 1)
    layer_inputs = np.cumprod([1.0, *w[:-1]])[:, None, None, None] * x_M
    np.testing.assert_allclose(actual["spread"], layer_inputs.var(axis=(2, 3)).mean(1), rtol=1e-5)
    np.testing.assert_allclose(actual["largest"], layer_inputs.max(axis=(2, 3)).mean(1), rtol=1e-5)
    np.testing.assert_allclose(
        actual["mean"], 0.9 * old + 0.1 * layer_inputs.mean(axis=(1, 2)), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_array_equal(actual["num_passes"], 5)
    np.testing.assert_array_equal(actual["untouched"], np.float32(0.1))


@pytest.mark.slow
def test_three_steps_of_adafactor_train_it_as_a_repeat():
    case = "circular"
    learner = Learner(
        functools.partial(
            optax.adafactor, min_dim_size_to_factor=2, multiply_by_parameter_scale=True
        ),
        0.03,
        clip_gradient_norm_to_value=0.5,
    )

    def train(model, params):
        specs, run = model.weight_specs()["params"], program(model)

        @jax.jit
        def step(params, opt_states):
            grads = run(params, data(case))["params"]
            loss = jnp.zeros(())
            return learner.bind(specs).update(grads, opt_states, params, loss)[:2]

        opt_states = jax.jit(learner.bind(specs).init)(params)
        for _ in range(3):
            params, opt_states = step(params, opt_states)
        return params

    first = repeated(case)[0]
    actual = to_repeated(train(pipeline_model(case), from_case(first, case)))
    expected = train(repeat_model(case), first)
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), expected, first)
    assert min(jax.tree.leaves(moved)) > 1e-3
    assert_trees_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_the_same_key_draws_the_layers_of_a_repeat_and_they_lie_on_their_stages():
    case = "circular_waiting"
    actual, expected = (
        jax.jit(lambda key, model=model: model.init(key)["params"])(jax.random.key(3))
        for model in (pipeline_model(case), repeat_model(case))
    )
    assert actual["blocks"]["w"].shape == (2, 2, 2, 8, 12)
    assert_trees_close(to_repeated(actual), expected, rtol=1e-6)
    assert_trees_close(from_case(expected, case), actual, rtol=1e-6)
    spec = pipeline_model(case).weight_specs()["params"]["blocks"]["w"]
    assert spec.partition_spec(MESH_AXES, "w") == PartitionSpec(None, "stage", None, None, "mdl")


@pytest.mark.slow
@pytest.mark.parametrize("where", [pytest.param("row", marks=pytest.mark.slow), "mesh"])
def test_cached_decoding_equals_the_uncached_forward_pass(where):
    num_rows, length, dims = 3, 5, 6
    block = functools.partial(Transformer, dims, 11, 3)
    model = NnxModel(
        lambda rngs: Pipeline(
            block,
            4,
            num_stages=2,
            num_microbatches=3,
            circular_repeat=1,
            pipelined=None if where == "mesh" else False,
            rngs=rngs,
        )
    )
    repeat = NnxModel(lambda rngs: Repeat(block, 4, rngs=rngs))
    params = drawn(repeat)
    x = jnp.asarray(np.random.default_rng(7).normal(size=(num_rows, length, dims)), jnp.float32)
    positions = jnp.broadcast_to(jnp.arange(length), (num_rows, length))
    mesh = make_mesh(MeshConfig(ici_mesh_shape=(2, 2, 2), axis_names=MESH_AXES))

    @jax.jit
    def decode(params, x):
        module = model.module({"params": params, "non_trainable": {}})
        if where != "mesh":
            return steps(module, x)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return steps(module, x)

    def steps(module, x):
        cache, outputs = module.init_cache(num_rows, length, jnp.float32), []
        for part in (slice(0, 4), slice(4, 5)):
            y, cache = module(x[:, part], positions=positions[:, part], cache=cache)
            outputs.append(y)
        return jnp.concatenate(outputs, axis=1), module(x)[0]

    stages = from_repeated(params, num_stages=2)
    if where == "mesh":
        stages, x = replicated(mesh, (stages, x))
    compiled = decode.lower(stages, x).compile()
    with_cache, without = compiled(stages, x)
    if where == "mesh":  # Weights and cache stay on their stages: rows go to them.
        in_loops = [item.kind for item in hlo.collectives(compiled) if item.count > 1]
        assert set(in_loops) == {"collective-permute"}
    x = jax.device_get(x)
    module = repeat.module({"params": params, "non_trainable": {}})
    expected = jax.jit(lambda module, x: module(x)[0])(module, x)
    np.testing.assert_allclose(without, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(with_cache, expected, rtol=1e-4, atol=1e-5)


WRONG = {
    r"Pipeline\.num_stages.*0": dict(num_stages=0),
    r"Pipeline\.num_layers.*6.*num_stages.*7": dict(num_stages=7),
    r"Pipeline\.num_layers.*6.*circular_repeat 4": dict(circular_repeat=4),
    r"Pipeline\.num_microbatches.*True": dict(num_microbatches=True),
    r"Pipeline\.microbatch_size.*0": dict(num_microbatches=None, microbatch_size=0),
    "num_microbatches.*4.*microbatch_size.*2": dict(microbatch_size=2),
    "num_microbatches.*None.*microbatch_size.*None": dict(num_microbatches=None),
    r"Pipeline\.checkpoint_policy.*'save_nothin'.*save_nothing": dict(
        checkpoint_policy="save_nothin"
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_settings_that_do_not_fit_are_errors(message):
    given = dict(num_stages=3, num_microbatches=4) | WRONG[message]
    with pytest.raises(ConfigError, match=message):
        Pipeline(functools.partial(Block, 3, 5), 6, **given, rngs=nnx.Rngs(0))


WRONG_CALLS = {
    r"'positions'.*\(5, 1\).*6.*1": (dict(num_microbatches=3), {"positions": np.zeros((5, 1))}),
    r"Pipeline.stage_axis.*'stage'.*\('data', 'mdl'\)": (
        dict(num_microbatches=3, pipelined=True),
        {},
    ),
}


@pytest.mark.parametrize("message", WRONG_CALLS)
def test_batches_and_meshes_that_do_not_fit_are_errors(message):
    changed, inputs = WRONG_CALLS[message]
    layer = functools.partial(
        Pipeline,
        functools.partial(Block, 3, 5),
        6,
        **dict(num_stages=3, num_microbatches=4) | changed,
    )
    mesh = make_mesh(MeshConfig(ici_mesh_shape=(2, 2), axis_names=("data", "mdl")))
    on_mesh = jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
    with on_mesh, pytest.raises(ConfigError, match=message):
        jax.eval_shape(lambda: layer(rngs=nnx.Rngs(0))(jnp.zeros((6, 3)), **inputs)[0])


@pytest.mark.parametrize("given", [dict(num_microbatches=4), dict(microbatch_size=4)], ids=str)
def test_blocks_that_assign_variables_take_no_rows_that_fill_up(given):
    layer = Pipeline(Statistics, 6, num_stages=2, **given, rngs=nnx.Rngs(0))
    with pytest.raises(ConfigError, match=f"{next(iter(given))} is 4.*batch size 6"):
        layer(jnp.zeros((6, 2)))


def test_a_batch_of_another_size_has_other_microbatches_of_the_same_size():
    layer = Pipeline(
        functools.partial(Block, 3, 5),
        4,
        num_stages=2,
        microbatch_size=2,
        pipelined=True,
        rngs=nnx.Rngs(0),
    )
    x = jnp.asarray(np.random.default_rng(8).normal(size=(6, 3)), jnp.float32)
    run = jax.jit(lambda layer, x: layer(x)[0])
    np.testing.assert_allclose(run(layer, x)[:2], run(layer, x[:2]), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_the_registered_lm_trains_and_decodes_on_stages_as_without():
    """The same key draws the same weights; three steps, then a prompt continued."""

    def run(experiment, mesh_shape):
        config = experiment.config()
        config.mesh.ici_mesh_shape = mesh_shape
        config.task.decoder = Greedy(max_decode_steps=3)
        job = fdl.build(config)
        partitioner = Partitioner(job.task, make_mesh(job.mesh))
        key = partitioner.key(0)
        state, losses = partitioner.init(key), []
        for _, inputs in zip(range(3), job.datasets["train"].batches(), strict=False):
            state, outputs = partitioner.train_step(state, partitioner.global_batch(inputs), key)
            losses.append([outputs["metrics"]["loss"][0], outputs["learner"]["grad_norm"]])
        prompts = {
            "ids": inputs["ids"][:4, :5],
            "prefix_lengths": np.array([5, 3, 1, 4], np.int32),
            "weights": np.ones(4, np.float32),
        }
        batch = partitioner.global_batch(prompts)
        decoded = partitioner.decode_step(state.mdl_vars, batch, key)
        stack = state.mdl_vars["params"]["transformer"]["blocks"]["ff_layer"]["ffn_layer1"]
        return losses, decoded["output_ids"], stack["linear"]["w"]

    losses, decoded, w = run(pipelined_experiments.Synthetic(), (2, 2, 2))
    wanted_losses, wanted_decoded, wanted_w = run(lm.Synthetic(), (1, 1, 1))
    assert w.shape[:3] == (1, 2, 1) and w.sharding.spec[:3] == (None, "stage", None)
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-4)
    np.testing.assert_allclose(np.asarray(w)[0, :, 0], wanted_w, rtol=1e-3, atol=1e-5)
    np.testing.assert_array_equal(decoded, wanted_decoded)


@pytest.mark.slow
@pytest.mark.parametrize("dropless", nightly_but({False}, [False, True]))
def test_a_mixture_of_experts_is_the_same_on_stages_as_in_a_row(dropless):
    """Router losses, drops and outputs: experts and stages on axes of their own."""
    batch = ("expert", None, None)
    feed_forward = functools.partial(
        TransformerFeedForwardMoe,
        num_experts=3,
        dropless=dropless,
        weight_split_dims_mapping=("expert", None, "mdl"),
        activation_split_dims_mapping=batch,
    )

    class Mixture(BaseLayer):
        def __init__(self, *, rngs):
            self.feed_forward = feed_forward(6, 10, rngs=rngs)

        def __call__(self, x, *, key=None, cache=None):
            return self.feed_forward(x, key=key), cache

    mesh = make_mesh(MeshConfig(ici_mesh_shape=(2, 2, 2), axis_names=("stage", "expert", "mdl")))
    x = jnp.asarray(np.random.default_rng(9).normal(size=(12, 5, 6)), jnp.float32)

    def run(where):
        model = NnxModel(
            lambda rngs: Pipeline(
                Mixture,
                4,
                num_stages=2,
                num_microbatches=3,
                circular_repeat=2,
                checkpoint_policy="save_everything",
                pipelined=None if where == "mesh" else False,
                activation_split_dims_mapping=batch,
                rngs=rngs,
            )
        )

        @jax.jit
        def apply(params, x):
            def objective(params):
                module = model.module({"params": params, "non_trainable": {}})
                outputs = module(x)[0]
                actual = intermediates(module, AuxLoss) | intermediates(module, Summary)
                aux = sum(jnp.sum(a) for a in intermediates(module, AuxLoss).values())
                return jnp.sum(jnp.sin(outputs)) + aux, (outputs, actual)

            if where == "row":
                return jax.grad(objective, has_aux=True)(params)
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                return jax.grad(objective, has_aux=True)(params)

        params = drawn(model)
        return apply(*(replicated(mesh, (params, x)) if where == "mesh" else (params, x)))

    expected = run("row")
    assert expected[1][1] and all(np.abs(a).max() > 0 for a in jax.tree.leaves(expected[0]))
    assert_trees_close(run("mesh"), expected, rtol=1e-3, atol=1e-4)
