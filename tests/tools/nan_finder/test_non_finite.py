"""run.debug_nans names where a planted fault is (layer, turn, line) and blames nothing else."""

import dataclasses
import functools
import inspect
import re

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from praxis_lite.core import (
    Learner,
    MeshConfig,
    NnxModel,
    Partitioner,
    make_mesh,
)
from praxis_lite.job.job_dir import JobDir
from praxis_lite.layers import BaseLayer, FeedForward, Repeat
from praxis_lite.layers.base.base_layer import ones
from praxis_lite.models import FunctionModel, LinenModel
from praxis_lite.optimizers import DynamicLossScale
from praxis_lite.tasks.loss import LossTask
from praxis_tools.nan_finder.reports import MAX_REPORTS, NonFiniteReports
from tests.support.explicit_partitioner import explicit_partitioner
from tests.support.float16 import HALF, needs_float16
from tests.support.job_runs import home, lines_of, succeed
from tests.support.line_jobs import LINE

NUM_LAYERS, DIMS = 3, 7


class Gate(BaseLayer):
    """Numbers that are harmless while the weights are 1."""

    def __init__(self, *, rngs):
        for name in ("log_of", "root_of", "half_of", "brain_of"):
            setattr(self, name, self.weight((), init=ones, rngs=rngs))

    def __call__(self, x):
        x += jnp.log(self.log_of[...])  # line: log
        x += jnp.sqrt(jnp.square(self.root_of[...]))  # line: root
        x *= (self.half_of[...].astype(HALF) * 2.0).astype(x.dtype) - 1.0  # line: half
        brain = self.brain_of[...].astype(jnp.bfloat16)
        return x * (brain * 2.0).astype(x.dtype)  # line: brain


class Block(BaseLayer):
    def __init__(self, *, rngs):
        self.ffn = FeedForward(DIMS, DIMS, rngs=rngs)
        self.gate = Gate(rngs=rngs)

    def __call__(self, x, *, key=None, cache=None):
        return self.gate(jnp.tanh(self.ffn(x))), cache


class Model(BaseLayer):
    """A stack, and a softmax over what a mask leaves of its outputs."""

    def __init__(self, *, unroll=False, rngs):
        self.stack = Repeat(Block, NUM_LAYERS, unroll=unroll, rngs=rngs)

    def __call__(self, x, seen):
        # NaN that is never used, and minus infinity that is meant.
        x = jnp.where(x > 0, jnp.log(x), x)
        x, _ = self.stack(x)
        logits = jnp.where(seen, x, -jnp.inf)
        return jax.nn.softmax(logits)  # line: softmax


def loss(model, inputs, key):
    probs = model(inputs["inputs"], inputs["seen"])
    return jnp.sum(jnp.square(probs - inputs["labels"]), axis=1)


def line_of(mark):
    """Returns "test_non_finite.py:17" of the line with a mark."""
    for function in (Gate, Model, Calling, Foreign, LinenGate, with_log):
        lines, start = inspect.getsourcelines(function)
        for number, line in enumerate(lines, start):
            if line.endswith(f"# line: {mark}\n"):
                return f"test_non_finite.py:{number}"
    raise AssertionError(mark)


def batch_of(num_rows):
    rng = np.random.default_rng(0)
    return {
        "inputs": rng.normal(size=(num_rows, DIMS)).astype(np.float32),
        "labels": np.zeros((num_rows, DIMS), np.float32),
        "seen": np.arange(DIMS)[None] < rng.integers(2, DIMS, size=(num_rows, 1)),
        "weights": np.ones(num_rows, np.float32),
    }


@dataclasses.dataclass
class Bench:
    """A task on a mesh, its state after a step, and the reports of the steps that are made."""

    partitioner: Partitioner
    num_rows: int
    reports: NonFiniteReports = None
    lines: list = dataclasses.field(default_factory=list)

    def report(self, tmp_path, fault=None, batch=None):
        """Returns the report on a step made with a fault in its weights or batch."""
        key, lines = self.partitioner.key(0), []
        if self.reports is None:
            self.reports = NonFiniteReports(
                self.partitioner, tmp_path / "non_finite.txt", self.lines.append, max_reports=99
            )
        state = planted(self.partitioner.init(key), fault or {})
        batch = self.partitioner.global_batch({**batch_of(self.num_rows), **(batch or {})})
        state, outputs = self.partitioner.train_step(state, batch, key)
        before = jax.device_get(state)
        self.reports.check(1, state, batch, key, outputs)
        jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state))
        lines, self.lines[:] = list(self.lines), []
        return "\n".join(lines)


def planted(state, fault):
    """Returns the state with values put into weights: {"stack/blocks/gate/log_of": (2, -1.0)}."""

    def value(path, x):
        name = jax.tree_util.keystr(path, simple=True, separator="/").removeprefix("params/")
        if name not in fault:
            return x
        index, number = fault[name]
        changed = np.array(x)
        changed[index] = number
        return jax.device_put(changed, x.sharding)

    mdl_vars = jax.tree_util.tree_map_with_path(value, state.mdl_vars)
    return dataclasses.replace(state, mdl_vars=mdl_vars)


@functools.cache
def bench(partitioner=Partitioner, shape=(1, 1, 1), accumulation_steps=1, unroll=False):
    num_rows = 13 if accumulation_steps == 1 else 14
    learner = Learner(
        optax.adam,
        0.1,
        gradient_accumulation_steps=accumulation_steps,
        loss_scale=DynamicLossScale(),
    )
    rows = ("replica", "data")
    task = LossTask(
        NnxModel(functools.partial(Model, unroll=unroll)),
        loss,
        learner,
        inputs_split_mapping={"map_1d": (rows,), "map_2d": (rows, None)},
    )
    mesh = make_mesh(MeshConfig(ici_mesh_shape=shape, axis_names=("replica", "data", "mdl")))
    return Bench(partitioner(task, mesh), num_rows)


BENCHES = [
    pytest.param({"shape": (1, 4, 2)}, id="mesh"),
    pytest.param(
        {"shape": (1, 4, 2), "partitioner": explicit_partitioner},
        id="shard_map",
        marks=pytest.mark.slow,
    ),
    pytest.param({"accumulation_steps": 2}, id="accumulated", marks=pytest.mark.nightly),
    pytest.param({"unroll": True}, id="unrolled", marks=pytest.mark.nightly),
]
each_bench = pytest.mark.parametrize("settings", BENCHES)


def weight(settings, name, layer):
    """Returns a layer's weight as `planted` names it, and the path of the layer in a report."""
    if settings.get("unroll"):
        return f"stack/blocks/{layer}/{name}", (), f"stack/blocks/{layer}/gate"
    return f"stack/blocks/{name}", layer, f"stack/blocks[{layer}]/gate"


def planted_in(settings, name, layer, value):
    path, index, where = weight(settings, f"gate/{name}", layer)
    return {path: (index, value)}, f"in the layer {where}, "


@each_bench
def test_a_healthy_step_is_not_spoken_of(settings, tmp_path):
    assert bench(**settings).report(tmp_path) == ""


@each_bench
@pytest.mark.parametrize("layer", [0, 2])
def test_the_logarithm_of_a_negative_number_is_found_in_its_layer(settings, layer, tmp_path):
    fault, where = planted_in(settings, "log_of", layer, -1.0)
    message = bench(**settings).report(tmp_path, fault)
    assert "step 1: the loss is nan and the gradient norm is nan" in message
    assert (
        f"the first NaN, in the forward pass: {where}produced by log, at {line_of('log')}"
        in message
    )
    assert message.count("\n") == 1
    assert ("microbatch 0" in message) == ("accumulation_steps" in settings)


@each_bench
def test_what_only_the_gradient_divides_by_zero_is_found_in_the_backward_pass(settings, tmp_path):
    fault, where = planted_in(settings, "root_of", 1, 0.0)
    message = bench(**settings).report(tmp_path, fault)
    assert "the gradient norm is nan" in message and "the loss is nan" not in message
    assert "in the backward pass (the loss is finite): " in message
    assert where in message and line_of("root") in message


@each_bench
@pytest.mark.parametrize(
    ("name", "value"), [pytest.param("half", 4e4, marks=needs_float16), ("brain", 3e38)]
)
def test_an_overflow_is_found_and_so_is_the_nan_that_comes_of_it(settings, name, value, tmp_path):
    fault, where = planted_in(settings, f"{name}_of", 1, value)
    message = bench(**settings).report(tmp_path, fault)
    assert "the first infinity, in the forward pass: " in message
    assert f"{where}produced by mul, at {line_of(name)}" in message
    assert "the first NaN, computed from it: in the layer " in message


@each_bench
@pytest.mark.parametrize(("value", "word"), [(np.nan, "NaN"), (np.inf, "infinite")])
def test_a_weight_that_was_not_finite_is_said_rather_than_a_layer(settings, value, word, tmp_path):
    path, index, _ = weight(settings, "gate/log_of", 2)
    message = bench(**settings).report(tmp_path, {path: (index, value)})
    assert f"the weight {path} was {word} before the step" in message
    if not settings.get("unroll"):
        assert "in 1 of its 3 rows (first dim), the first [2]" in message
    assert "in the layer" not in message


@each_bench
@pytest.mark.parametrize(("value", "word"), [(np.nan, "NaN"), (-np.inf, "infinite")])
def test_a_batch_that_was_not_finite_is_said_rather_than_a_layer(settings, value, word, tmp_path):
    result = bench(**settings)
    labels = batch_of(result.num_rows)["labels"]
    labels[[5, 11], 3] = value
    message = result.report(tmp_path, batch={"labels": labels})
    assert f"the batch's labels was {word} before the step, in 2 of its " in message
    assert "the first [5, 11]" in message and "in the layer" not in message


@each_bench
def test_a_mask_is_blamed_only_where_it_leaves_nothing(settings, tmp_path):
    result = bench(**settings)
    seen = batch_of(result.num_rows)["seen"]
    seen[7] = False
    message = result.report(tmp_path, batch={"seen": seen})
    assert (
        "the first NaN, in the forward pass, from an infinite constant: produced by sub" in message
    )
    assert line_of("softmax") in message


def test_reports_are_kept_in_a_file_and_there_are_not_too_many(tmp_path):
    result = bench()
    partitioner, message = result.partitioner, []
    reports = NonFiniteReports(partitioner, tmp_path / "many.txt", message.append)
    result.report(tmp_path, {"stack/blocks/gate/log_of": (2, -1.0)})
    reports.search = result.reports.search  # Compiled once.
    key = partitioner.key(0)
    state = planted(partitioner.init(key), {"stack/blocks/gate/log_of": (2, -1.0)})
    batch = partitioner.global_batch(batch_of(13))
    for step in range(1, MAX_REPORTS + 4):
        state, outputs = partitioner.train_step(state, batch, key)
        reports.check(step, state, batch, key, outputs)
    written = (tmp_path / "many.txt").read_text().splitlines()
    assert written == message and len(written) == 2 * MAX_REPORTS + 1
    assert [line.split(":")[0] for line in written[::2]] == [
        *(f"step {step}" for step in range(1, MAX_REPORTS + 1)),
        f"  (no more steps are examined after {MAX_REPORTS} reports)",
    ]


@pytest.mark.slow
def test_a_job_reports_a_bad_step_and_goes_on_with_the_same_numbers(tmp_path):
    faults = (
        "datasets.train.nan_at=3,8",
        "run.num_train_steps=11",
        "run.loss_spikes.action=report",
    )
    quiet, debugged = JobDir(tmp_path / "quiet"), JobDir(tmp_path / "debugged")
    succeed(LINE, f"--job_log_dir={quiet.path}", "--set", *faults)
    done = succeed(LINE, f"--job_log_dir={debugged.path}", "--set", *faults, "run.debug_nans=true")
    assert lines_of(debugged.metrics_jsonl) == lines_of(quiet.metrics_jsonl)
    lines = lines_of(debugged.metrics_jsonl)
    assert [line["num_skipped_steps"] for line in lines] == [0] * 3 + [1] * 5 + [2] * 3
    written = debugged.non_finite_txt.read_text()
    assert [line for line in written.splitlines() if line.startswith("step")] == [
        f"step {step}: the loss is nan and the gradient norm is nan; rerun operation by operation:"
        for step in (4, 9)
    ]
    where = "in 1 of its 14 rows (first dim), the first [3]"
    assert written.count(f"the batch's labels was NaN before the step, {where}") == 2
    assert set(written.splitlines()) <= set(done.out.splitlines())
    assert not quiet.non_finite_txt.exists()


class Foreign(nnx.Module):
    """A module of Flax alone, which opens no scopes."""

    def __init__(self, rngs):
        self.a = nnx.Param(jnp.ones(()))

    def __call__(self, x):
        return x + jnp.log(self.a[...])  # line: foreign


class Calling(nnx.Module):
    """A module that calls a layer of the library."""

    def __init__(self, rngs):
        self.ffn = FeedForward(DIMS, DIMS, activation="identity", rngs=rngs)

    def __call__(self, x):
        return self.ffn(x)  # line: calling


class LinenGate(linen.Module):
    @linen.compact
    def __call__(self, x):
        return x + jnp.log(self.param("a", linen.initializers.ones, ()))  # line: linen


class Net(linen.Module):
    @linen.compact
    def __call__(self, x):
        return LinenGate(name="gate")(x)


def with_log(params, inputs, key):
    return jnp.sum(inputs["inputs"] + jnp.log(params["a"]), axis=1)  # line: function


def summed(model, inputs, key):
    return jnp.sum(model(inputs["inputs"]), axis=1)


@pytest.mark.parametrize(
    ("model", "loss_fn", "weight", "layer", "mark"),
    [
        (lambda: NnxModel(Foreign), summed, "a", "", "foreign"),
        (lambda: LinenModel(Net(), {"x": (1, DIMS)}), summed, "gate/a", "Net/gate", "linen"),
        (lambda: FunctionModel(lambda key: {"a": jnp.ones(())}), with_log, "a", "", "function"),
    ],
    ids=["nnx", "linen", "function"],
)
def test_models_that_open_no_scopes_are_told_by_their_lines(
    model, loss_fn, weight, layer, mark, tmp_path
):
    task = LossTask(model(), loss_fn, Learner(optax.sgd, 0.1))
    partitioner = Partitioner(task, make_mesh(MeshConfig(ici_mesh_shape=(1, 1, 1))))
    message = Bench(partitioner, 13).report(tmp_path, {weight: ((), -1.0)})
    where = f"in the layer {layer}, " if layer else ""
    assert (
        f"the first NaN, in the forward pass: {where}produced by log, at {line_of(mark)}" in message
    )


def test_a_line_of_the_library_is_said_with_the_line_outside_that_called_it(tmp_path):
    task = LossTask(NnxModel(Calling), summed, Learner(optax.sgd, 0.1))
    partitioner = Partitioner(task, make_mesh(MeshConfig(ici_mesh_shape=(1, 1, 1))))
    message = Bench(partitioner, 13).report(tmp_path, {"ffn/linear/w": ((), 3e38)})
    assert re.search(
        r"in the layer linear, produced by dot_general, at dense\.py:\d+, "
        f"called at {line_of('calling')}",
        message,
    ), message


def bad_for_one_key(params, inputs, key):
    away = jnp.abs(params["a"] - jax.random.uniform(key)) - 1e-6
    return jnp.sum(inputs["inputs"] + jnp.log(away), axis=1)


def test_a_step_is_run_again_with_its_own_key(tmp_path):
    model = FunctionModel(lambda key: {"a": jnp.full((), 2.0)})
    task = LossTask(model, bad_for_one_key, Learner(optax.sgd, 0.1))
    result = Bench(Partitioner(task, make_mesh(MeshConfig(ici_mesh_shape=(1, 1, 1)))), 13)
    drawn = jax.random.uniform(jax.random.fold_in(jax.random.key(0), 0))
    assert "produced by log" in result.report(tmp_path, {"a": ((), drawn)})


@pytest.mark.slow
def test_a_language_model_on_uneven_sizes_is_told_its_layer(tmp_path):
    home()
    from jobzoo.experiments import Tiny

    job = fdl.build(Tiny().config())
    result = Partitioner(job.task, make_mesh(job.mesh))
    key, message = result.key(0), []
    batch = result.global_batch(next(job.datasets["train"].batches()))
    reports = NonFiniteReports(result, tmp_path / "non_finite.txt", message.append)
    for name, layer in (("ff_layer/ffn_layer2", 1), ("ff_layer/ffn_layer1", 0)):
        weight = f"transformer/blocks/{name}/linear/w"
        state = planted(result.init(key), {weight: (layer, 3e38)})
        state, outputs = result.train_step(state, batch, key)
        reports.check(1, state, batch, key, outputs)
        where = f"in the layer transformer/blocks[{layer}]/{name}/linear"
        assert ", in the forward pass: " in message[1] and where in message[1], message
        assert "produced by dot_general, at dense.py:" in message[1]
        message.clear()
