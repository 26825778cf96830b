"""1F1B trains as one device does on the whole batch: loss, metrics, gradients of every weight."""

import functools

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from praxis_lite import ConfigError
from praxis_lite.core import Learner, MeshConfig, Partitioner, make_mesh
from praxis_lite.core.partitioner import accumulation
from praxis_lite.core.partitioner.steps import init_state, train_step
from praxis_lite.layers import (
    Embedding,
    FullSoftmax,
    OneForwardOneBackward,
    Pipeline,
    SharedEmbeddingSoftmax,
    Transformer,
    TransformerFeedForward,
    TransformerFeedForwardMoe,
    TransformerLm,
    set_sharding_params,
)
from praxis_lite.layers.stacking.pipelining.pipeline_schedules import InterleavedSchedule
from praxis_lite.tasks.language_model import LanguageModelTask
from praxis_tools.explain import hlo, hlo_runs, hlo_text
from tests.layers.stacking.pipeline_cases import MESH_AXES, assert_trees_close
from tests.support.marks import nightly_but, slow_or_nightly

SIZES = dict(vocab_size=37, model_dims=12, hidden_dims=20, num_heads=2)
TIED = dict(softmax_tpl=fdl.Partial(SharedEmbeddingSoftmax))
UNTIED = dict(softmax_tpl=fdl.Partial(FullSoftmax), separate_embedding_tpl=fdl.Partial(Embedding))
EVEN = dict(num_stages=2, num_microbatches=4)
# Six layers twice round four stages, of 1, 1, 1, 0 layers; microbatches that divide neither the
# rows nor the stages.
UNEVEN = dict(num_stages=3, num_microbatches=5, circular_repeat=2)


def config(ends, pipeline, num_layers=4, dropout=0.0, **learner):
    lm = fdl.Partial(
        TransformerLm,
        **SIZES,
        num_layers=num_layers,
        max_seq_length=8,
        **ends,
        residual_dropout_prob=dropout,
        stacked_transformer_tpl=fdl.Partial(Pipeline, **pipeline),
    )
    return fdl.Config(
        LanguageModelTask,
        model=set_sharding_params(lm, {"batch": ("data",)}),
        learner=fdl.Config(Learner, fdl.Partial(optax.sgd), 1.0, **learner),
        inputs_split_mapping={"map_2d": (("stage", "data"), None)},
    )


def batch(num_rows):
    rng = np.random.default_rng(0)
    tokens = rng.integers(37, size=(num_rows, 9), dtype=np.int32)
    weights = rng.integers(0, 2, size=(num_rows, 8)).astype(np.float32)
    weights[1::4] = 0.0  # Of four microbatches one has no weight at all.
    return {"ids": tokens[:, :-1], "labels": tokens[:, 1:], "weights": weights}


def after_a_step(task, inputs, strategy=None):
    """Returns metrics (value, weight), and by how much each weight moved: its gradient."""
    return step_of(task, strategy)(drawn_state(task), jax.random.key(3), inputs)


def step_of(task, strategy):
    """Returns a function from a state, a key and a batch to the results of `after_a_step`."""
    gradients = strategy and strategy.on(task, None, None, None)
    settings = {} if gradients is None else {"value_and_grad": gradients.value_and_grad}

    @jax.jit
    def run(state, key, inputs):
        new, outputs = train_step(task, state, inputs, key, **settings)
        params = new.mdl_vars["params"]
        moved = jax.tree.map(lambda a, b: a - b, state.mdl_vars["params"], params)
        return outputs["metrics"], moved

    return run


def drawn_state(task):
    """Returns a state with weights drawn by NumPy, so that no init is compiled."""
    rng = np.random.default_rng(1)

    def draw(path, leaf):
        if "params" not in jax.tree_util.keystr(path):
            return np.zeros(leaf.shape, leaf.dtype)
        return rng.normal(scale=0.3, size=leaf.shape).astype(leaf.dtype)

    shapes = jax.eval_shape(lambda: init_state(task, jax.random.key(0)))
    return jax.tree_util.tree_map_with_path(draw, shapes)


CASES = {
    "tied, uneven, split": (TIED, UNEVEN | dict(split_backward=True), dict(num_layers=8)),
    "tied, one microbatch": (TIED, dict(num_stages=2, num_microbatches=1), {}),
    "untied, accumulated": (
        UNTIED,
        dict(num_stages=2, microbatch_size=3),
        dict(gradient_accumulation_steps=2),
    ),
}


@pytest.mark.parametrize(
    "name", slow_or_nightly({"untied, accumulated"}, {"tied, uneven, split"}, CASES)
)
def test_a_step_is_that_of_one_device_on_the_whole_batch(name):
    ends, pipeline, others = CASES[name]
    inputs = batch(12)
    whole = dict(others) | dict(gradient_accumulation_steps=1)
    one = fdl.build(config(ends, pipeline | dict(pipelined=False), **whole))
    expected = after_a_step(one, inputs)
    task = fdl.build(config(ends, pipeline | dict(pipelined=True), **others))
    metrics, moved = after_a_step(task, inputs, OneForwardOneBackward())
    assert_trees_close(metrics, expected[0], rtol=1e-5)
    assert_trees_close(moved, expected[1], rtol=1e-4, atol=1e-6)


@pytest.mark.nightly
def test_dropout_is_that_of_accumulation():
    """Where the blocks follow one another, without ticks, the strategy accumulates."""
    row, ticks = (
        after_a_step(
            fdl.build(config(TIED, EVEN | dict(pipelined=is_in_ticks), num_layers=2, dropout=0.5)),
            batch(8),
            OneForwardOneBackward(),
        )
        for is_in_ticks in (False, True)
    )
    assert_trees_close(ticks, row, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_microbatch_of_weight_zero_counts_for_nothing_even_if_it_is_nan():
    pipeline = EVEN | dict(pipelined=True, split_backward=True)
    task = fdl.build(config(TIED, pipeline, num_layers=2))

    class Poisoned(type(task)):
        def compute_loss(self, model, inputs, key):
            metrics = super().compute_loss(model, inputs, key)
            value, weight = metrics["loss"]
            factor = jnp.where(weight == 0, inputs["poison"][0], 1.0)
            return metrics | {"loss": (factor * value, weight)}

    poisoned = Poisoned(model=task.model, learner=task.learner)
    step, state = step_of(poisoned, OneForwardOneBackward()), drawn_state(poisoned)
    expected, actual = (
        step(state, jax.random.key(3), batch(8) | {"poison": np.full(8, factor, np.float32)})[1]
        for factor in (1.0, np.nan)
    )
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(actual))
    assert_trees_close(actual, expected, rtol=1e-6)


@functools.cache
def on_mesh(num_microbatches, split_backward=False, mesh_shape=(2, 2, 2)):
    """Returns a partitioner on a mesh, a batch, and the compiled step."""
    pipeline = dict(
        num_stages=2,
        num_microbatches=num_microbatches,
        split_backward=split_backward,
    )
    task_config = config(TIED, pipeline)
    task_config.model.softmax_tpl.activation_split_dims_mapping = (("stage", "data"), None, "mdl")
    mesh = make_mesh(MeshConfig(ici_mesh_shape=mesh_shape, axis_names=MESH_AXES))
    partitioner = Partitioner(fdl.build(task_config), mesh, gradients=OneForwardOneBackward())
    inputs = batch(4 * num_microbatches)
    spec = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs)
    return partitioner, inputs, partitioner.train_step.lower(spec).compile()


@pytest.mark.slow
@pytest.mark.parametrize("split_backward", nightly_but({True}, [False, True]))
def test_on_a_mesh_a_step_is_that_of_one_device(split_backward):
    partitioner, inputs, _ = on_mesh(6, split_backward)
    task = fdl.build(config(TIED, dict(num_stages=2, num_microbatches=6)))
    mesh = make_mesh(MeshConfig(ici_mesh_shape=(1, 1, 1), axis_names=MESH_AXES))
    actual, expected = (
        metrics_and_weights(item, inputs) for item in (partitioner, Partitioner(task, mesh))
    )
    assert_trees_close(actual, expected, rtol=1e-4, atol=2e-6)


def metrics_and_weights(partitioner, inputs):
    """Returns the metrics of a step, and the weights after it."""
    key = partitioner.key(0)
    state, outputs = partitioner.train_step(
        partitioner.init(key), partitioner.global_batch(inputs), key
    )
    return jax.device_get((outputs["metrics"], state.mdl_vars["params"]))


@pytest.mark.nightly
def test_the_loops_are_the_phases_and_x_and_its_gradient_shift_once_a_tick():
    compiled = on_mesh(6, True, (2, 1, 1))[-1]
    schedule = InterleavedSchedule(2, 6, 1, split_backward=True)
    parsed = hlo_text.parse(compiled)
    trips = [
        hlo_runs.trip_count(parsed, site.computation, site.instruction)
        for site in hlo_runs.executed(parsed)
        if site.instruction.opcode == "while" and not site.scope
    ]
    # Phases of one tick are no loops.
    assert sorted(trips) == sorted(len(ticks) for ticks, *_ in schedule.phases if len(ticks) > 1), (
        trips,
        schedule.phases,
    )
    permutes = [
        item.count
        for item in hlo.collectives(compiled)
        if item.kind == "collective-permute" and item.count > 1
    ]
    expected = sum(
        len(ticks) * (forward + backward)
        for ticks, forward, backward, _ in schedule.phases
        if len(ticks) > 1
    )
    assert sum(permutes) == expected, (permutes, schedule.phases)


@pytest.mark.nightly
def test_more_microbatches_keep_no_more_inputs_of_stages():
    """GPipe keeps the input of every tick: the reason for 1F1B."""
    few, many = (on_mesh(number, True)[-1].memory_analysis() for number in (6, 24))
    # Besides, each microbatch has its ids, positions and metrics: a few bytes a token.
    x_bytes = 4 * 8 * SIZES["model_dims"] * 4
    assert many.temp_size_in_bytes - few.temp_size_in_bytes < (24 - 6) * x_bytes


def with_layers(task_config, layer, **settings):
    """Returns a task with other feed-forward layers."""
    feed_forward = fdl.Partial(layer, **settings)
    task_config.model.transformer_layer_tpl = fdl.Partial(Transformer, tr_fflayer_tpl=feed_forward)
    return fdl.build(task_config)


@pytest.mark.nightly
def test_a_backward_pass_in_one_part_keeps_residuals_of_one_tick():
    whole, split = (on_mesh(6, is_split)[-1].memory_analysis() for is_split in (False, True))
    # In two parts it keeps those of two ticks, as many as there are stages: of both layers of a
    # stage more than the MLP's hidden dims, split over two devices as its rows are.
    hidden = 2 * (4 // 2) * 8 * (SIZES["hidden_dims"] // 2) * 4
    assert split.temp_size_in_bytes - whole.temp_size_in_bytes > hidden


class Counting(TransformerFeedForward):
    """A feed-forward layer that keeps a number from step to step."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.steps = nnx.BatchStat(jnp.zeros(()))


@pytest.mark.slow
@pytest.mark.parametrize("name", nightly_but({"split"}, ["split", "uneven"]))
def test_what_layers_assign_is_what_gpipe_makes_of_it(name):
    """Losses and numbers of routers, and a balance bias that the counts of their tokens move."""
    experts = dict(
        num_experts=3,
        num_experts_per_token=2,
        gating_func="top_k",
        dropless=True,
        score_func="sigmoid",
        bias_update_rate=0.05,
        moe_load_balance_loss_weight=0.5,
    )
    sizes, num_layers = dict(num_stages=2, num_microbatches=3, pipelined=True), 2
    if name == "uneven":  # The second stage has a layer and a free place.
        sizes, num_layers = sizes | dict(circular_repeat=2), 6
    inputs = batch(12) | {"weights": np.ones((12, 8), np.float32)}
    actual, expected = (
        after_a_step(
            with_layers(
                config(TIED, sizes | dict(split_backward=name == "split"), num_layers),
                TransformerFeedForwardMoe,
                **experts,
            ),
            inputs,
            strategy,
        )
        for strategy in (OneForwardOneBackward(), None)
    )
    block = expected[1]["transformer"]["blocks"]["ff_layer"]
    assert np.abs(block["gate_correction"]).max() > 0.01
    assert any("aux" in metric or "moe" in metric for metric in expected[0]), list(expected[0])
    assert_trees_close(actual, expected, rtol=1e-4, atol=1e-6)


def test_rows_that_experts_would_count_cannot_be_filled_up():
    task = with_layers(config(TIED, EVEN), TransformerFeedForwardMoe, num_experts=2)
    gradients = OneForwardOneBackward().on(task, None, None, None)
    gradients.check_rows(jax.eval_shape(lambda: batch(12)), 1)
    with pytest.raises(ConfigError, match="batch size 10 .*4 microbatches.*assign variables"):
        gradients.check_rows(jax.eval_shape(lambda: batch(10)), 1)


def test_models_that_it_cannot_cut_are_errors():
    task_config = config(TIED, EVEN)
    kept = with_layers(task_config, Counting)
    del task_config.model.stacked_transformer_tpl
    for task, message in ((fdl.build(task_config), "one Pipeline.* 0"), (kept, "contains .*steps")):
        with pytest.raises(ConfigError, match=message):
            OneForwardOneBackward().on(task, None, None, None)


def test_rows_that_cannot_be_filled_up_are_an_error():
    task = fdl.build(config(TIED, EVEN))
    gradients = OneForwardOneBackward().on(task, None, None, None)
    spec = {"ids": jax.ShapeDtypeStruct((10, 8), jnp.int32)}
    with pytest.raises(ConfigError, match="10 rows.*4 microbatches.*weights.*'ids'"):
        gradients.check_rows(spec, 1)
    assert accumulation.num_rows_of(spec) == 10
