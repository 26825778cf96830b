"""A backward pass in two parts: the numbers of one, without bubbles for gradients of weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from praxis_lite import ConfigError
from praxis_lite.core import NnxModel
from praxis_lite.layers import AuxLoss, BaseLayer, Pipeline, Repeat, intermediates
from praxis_lite.layers.stacking.pipelines import to_repeated
from praxis_lite.layers.stacking.pipelining.pipeline_schedules import Schedule
from praxis_lite.layers.stacking.pipelining.split_backward import split_function, used_arguments
from praxis_tools.explain import hlo, hlo_runs, hlo_text
from tests.layers.stacking.pipeline_cases import (
    CASES,
    Block,
    assert_trees_close,
    drawn,
    from_repeated,
    on_mesh,
    pipelined,
    program,
    repeated,
)
from tests.support.marks import slow_but

# R repeats, S stages, M microbatches.


def block_backward(weights, x, of_y):
    def block(weights, x):
        hidden = jax.nn.gelu(jnp.einsum("bd,dh->bh", x, weights["first"]))
        return x + jax.checkpoint(lambda h: jnp.tanh(h @ weights["second"]))(hidden)

    _, pull = jax.vjp(block, weights, x)
    of_weights, of_x = pull(of_y)
    return of_x, of_weights


def block_arguments():
    rng = np.random.default_rng(0)
    weights = {"first": rng.normal(size=(5, 7)), "second": rng.normal(size=(7, 5))}
    given = weights, rng.normal(size=(3, 5)), rng.normal(size=(3, 5))
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), given)


def test_a_program_in_two_parts_gives_the_same_and_no_product_is_in_both():
    given = block_arguments()
    split = split_function(block_backward, given, num_shared=1)
    of_x, residuals = split.first(*given)
    actual = of_x, split.second(residuals, given[0])
    assert_trees_close(actual, block_backward(*given), rtol=1e-6)
    products = [
        str(jax.make_jaxpr(part)(*args)).count("dot_general[")
        for part, args in ((split.first, given), (split.second, (residuals, given[0])))
    ]
    # Two forward again and two for the inputs' gradients; two for the weights'.
    assert products == [4, 2]


def test_residuals_are_no_arguments_that_are_given_again():
    given = block_arguments()
    split = split_function(block_backward, given, num_shared=2)
    _, residuals = split.first(*given)
    assert sorted(a.shape for a in residuals) == [(3, 5), (3, 7), (3, 7)]


def test_arguments_that_results_depend_on():
    given = {"a": 1.0, "b": 2.0, "c": 3.0}
    assert used_arguments(lambda given: jax.jit(jnp.sin)(given["a"]) + 0 * given["c"], [given]) == [
        True,
        False,
        True,
    ]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gpipe_uneven", "circular_uneven"])
def test_ticks_equal_a_repeat_in_outputs_and_gradients(case):
    actual = pipelined(case, split_backward=True)
    assert_trees_close(actual, repeated(case)[1], rtol=1e-4, atol=1e-5)


def trips(compiled):
    """Returns how often each of a program's outermost loops runs."""
    parsed = hlo_text.parse(compiled)
    return [
        hlo_runs.trip_count(parsed, site.computation, site.instruction)
        for site in hlo_runs.executed(parsed)
        if site.instruction.opcode == "while" and not site.scope
    ]


ON_MESH = {"circular_waiting": {}, "circular_waiting streamed": {"stream_io": True}}


@pytest.mark.parametrize("name", slow_but({"circular_waiting"}, ON_MESH))
def test_on_a_mesh_it_gives_the_same_by_one_collective_permute_per_tick(name):
    case = name.split()[0]
    repeats, stages, _, microbatches, *_ = CASES[case]
    actual, compiled = on_mesh(case, split_backward=True, **ON_MESH[name])
    assert_trees_close(actual, repeated(case)[1], rtol=1e-4, atol=1e-5)
    schedule = Schedule(stages, microbatches, repeats)
    # The one tick backward without weights is no loop.
    assert trips(compiled) == [schedule.num_ticks, schedule.num_weight_ticks]
    assert schedule.num_weight_ticks == repeats * microbatches
    in_loops = [collective for collective in hlo.collectives(compiled) if collective.count > 1]
    permutes = [item.count for item in in_loops if item.kind == "collective-permute"]
    num_streams = 2 if ON_MESH[name] else 1
    assert sorted(permutes) == sorted(trips(compiled) * num_streams)
    # Nothing is brought together: weights, inputs and microbatches stay on their stages.
    assert {item.kind for item in in_loops} == {"collective-permute", "all-reduce"}


def test_the_share_of_bubbles_is_that_of_the_compiled_loops():
    case = "circular_waiting"
    repeats, stages, _, microbatches, *_ = CASES[case]
    forward, with_weights = trips(on_mesh(case, split_backward=True)[1])
    # A tick forward again and by inputs costs 2 F, and one of weights F.
    backward = 2.0 * (with_weights + stages - 1)
    time = forward * 1.0 + backward + with_weights * 1.0
    busy = repeats * microbatches * 4.0
    schedule = Schedule(stages, microbatches, repeats)
    actual = schedule.split_bubble_share(forward=2.0, input_grads=1.0, weight_grads=1.0)
    assert actual == pytest.approx(1 - busy / time)
    assert actual < schedule.bubble_share


class OfEverySort(BaseLayer):
    """A block that has inputs with gradients, a float that is no array, and a loss of its own."""

    def __init__(self, *, rngs):
        self.w = self.weight((5, 5), rngs=rngs)
        self.steps = nnx.BatchStat(jnp.zeros((), jnp.int32))
        self.aux_loss = AuxLoss(jnp.zeros(()))

    def __call__(self, x, *, key=None, cache=None, encoded, factor, scale, **_):
        mask = 1.0 if key is None else jax.random.bernoulli(key, 0.5, x.shape)
        y = x + scale * jnp.tanh(x @ self.w[...]) * encoded * factor * mask
        self.steps.set_value(self.steps[...] + 1)
        self.aux_loss.set_value(jnp.mean(y**2))
        return y, cache


def test_inputs_losses_of_layers_and_dropout_have_the_gradients_of_blocks_in_a_row():
    rng = np.random.default_rng(3)
    x, encoded = jnp.asarray(rng.normal(size=(2, 12, 5)), jnp.float32)
    floats = {
        "w": jnp.asarray(rng.normal(size=(6, 5, 5)), jnp.float32),
        "x": x,
        "encoded": encoded,
        "factor": jnp.float32(0.7),
        "row": jnp.asarray(rng.normal(size=(1, 5)), jnp.float32),
    }

    def run(**settings):
        model = NnxModel(
            lambda rngs: Pipeline(
                OfEverySort,
                6,
                num_stages=3,
                circular_repeat=2,
                num_microbatches=4,
                rngs=rngs,
                **settings,
            )
        )

        def objective(floats):
            mdl_vars = {
                "params": {"blocks": {"w": floats["w"]}},
                "non_trainable": {"blocks": {"steps": jnp.zeros(6, jnp.int32)}},
            }
            module = model.module(from_repeated(mdl_vars, num_stages=3, circular_repeat=2))
            outputs = (
                module(
                    floats["x"],
                    key=jax.random.key(5),
                    encoded=floats["encoded"],
                    factor=floats["factor"],
                    scale=0.5,
                )[0]
                * floats["row"]
            )
            losses = to_repeated(intermediates(module, AuxLoss))["blocks/aux_loss"]
            weighted = jnp.sum(losses * jnp.arange(1.0, 7.0))
            return jnp.sum(jnp.sin(outputs)) + weighted, (outputs, losses)

        return jax.jit(jax.grad(objective, has_aux=True))(floats)

    expected = run(pipelined=False)
    assert min(float(jnp.abs(g).max()) for g in jax.tree.leaves(expected[0])) > 1e-2
    actual = run(pipelined=True, split_backward=True)
    assert_trees_close(actual, expected, rtol=1e-4, atol=1e-5)


class Poisoned(BaseLayer):
    """A layer that makes NaN, forward and backward, of rows that come to it out of order."""

    def __init__(self, *, rngs):
        self.index = nnx.BatchStat(jnp.zeros(()))
        self.w = self.weight((5,), rngs=rngs)

    def __call__(self, x, *, key=None, cache=None, **_):
        poison = jnp.where(x[:, :1] == self.index[...], 1.0, jnp.nan)
        y = x + jnp.tanh(self.w[...][None] * poison * x)
        return y.at[:, 0].set(x[:, 0] + 1), cache


@pytest.mark.parametrize(
    ("sizes", "more"),
    [
        ((5, 3, 1, 4), {"split_backward": True}),
        pytest.param((8, 3, 2, 6), {"stream_io": True}, marks=pytest.mark.slow),
        pytest.param(
            (6, 2, 2, 3), {"split_backward": True, "stream_io": True}, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_what_idle_stages_and_free_places_compute_reaches_nothing_nan_neither(sizes, more):
    num_layers, num_stages, num_repeats, num_microbatches = sizes
    form = functools.partial(from_repeated, num_stages=num_stages, circular_repeat=num_repeats)
    rng = np.random.default_rng(4)
    floats = {
        "w": jnp.asarray(rng.normal(size=(num_layers, 5)), jnp.float32),
        "x": jnp.asarray(rng.normal(size=(12, 5)), jnp.float32).at[:, 0].set(0.0),
    }

    def run(**settings):
        model = NnxModel(
            lambda rngs: Pipeline(
                Poisoned,
                num_layers,
                num_stages=num_stages,
                circular_repeat=num_repeats,
                num_microbatches=num_microbatches,
                rngs=rngs,
                **settings,
            )
        )

        def objective(floats):
            params = {"blocks": {"w": floats["w"]}}
            order = {"blocks": {"index": jnp.arange(num_layers, dtype=jnp.float32)}}
            module = model.module(form({"params": params, "non_trainable": order}))
            outputs = module(floats["x"])[0]
            return jnp.sum(jnp.sin(outputs)), outputs

        return jax.jit(jax.grad(objective, has_aux=True))(floats)

    expected = run(pipelined=False)
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(expected))
    assert_trees_close(run(pipelined=True, **more), expected, rtol=1e-4, atol=1e-5)


# Layers, S, M, rows, R: stages of 2, 2, 2, 1 layers; microbatches that divide neither rows nor
# stages, and fewer than stages that go round several times.
UNEQUAL = {
    (7, 4, 5, 15, 1): {"split_backward": True, "stream_io": True},
    (10, 4, 3, 9, 2): {"split_backward": True},
    (6, 2, 3, 10, 3): {"stream_io": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("sizes", UNEQUAL, ids=str)
def test_any_number_of_layers_and_of_microbatches_gives_what_a_repeat_does(sizes):
    num_layers, num_stages, num_microbatches, num_rows, num_repeats = sizes
    block, rng = functools.partial(Block, 7, 11), np.random.default_rng(2)
    x = rng.normal(size=(num_rows, 7)), rng.normal(size=(num_rows, 3, 11))
    given = dict(zip(("x", "encoded"), (jnp.asarray(a, jnp.float32) for a in x), strict=True))
    given["positions"] = jnp.asarray(rng.integers(0, 9, (num_rows, 1)), jnp.int32)
    model = NnxModel(lambda rngs: Repeat(block, num_layers, rngs=rngs))
    params = drawn(model)
    expected = jax.jit(program(model))(params, given)
    model = NnxModel(
        lambda rngs: Pipeline(
            block,
            num_layers,
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            circular_repeat=num_repeats,
            pipelined=True,
            rngs=rngs,
            **UNEQUAL[sizes],
        )
    )
    stages = from_repeated(params, num_stages=num_stages, circular_repeat=num_repeats)
    actual = jax.jit(program(model))(stages, given)
    num_stacked = 2 if num_layers % (num_stages * num_repeats) else 3
    actual["params"] = to_repeated(actual["params"], num_stacked=num_stacked)
    assert_trees_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_unequal_stages_have_the_layers_of_a_repeat_and_no_others():
    block = functools.partial(Block, 3, 5)
    make = lambda rngs: Pipeline(block, 7, num_stages=4, num_microbatches=2, rngs=rngs)  # noqa: E731
    model, repeat = NnxModel(make), NnxModel(lambda rngs: Repeat(block, 7, rngs=rngs))
    actual = model.init(jax.random.key(3))["params"]
    assert actual["blocks"]["w"].shape == (1, 7, 3, 5)
    expected = repeat.init(jax.random.key(3))["params"]
    assert_trees_close(to_repeated(actual, num_stacked=2), expected, rtol=1e-6)
    spec = model.weight_specs()["params"]["blocks"]["w"]
    assert tuple(spec.partition_spec(("stage", "mdl"), "w")) == (None, "stage", None, "mdl")


def test_policies_that_a_split_backward_pass_has_not_are_errors():
    with pytest.raises(ConfigError, match=r"checkpoint_policy.*save_everything.*split_backward"):
        Pipeline(
            functools.partial(Block, 3, 5),
            4,
            num_stages=2,
            num_microbatches=2,
            split_backward=True,
            checkpoint_policy="save_everything",
            rngs=nnx.Rngs(0),
        )
