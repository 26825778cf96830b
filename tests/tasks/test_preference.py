"""DPO: the loss of the paper in NumPy, a reference that stays, and the same numbers on a mesh."""

import functools
import json

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from praxis_lite import ConfigError, MeshConfig
from praxis_lite.core import Learner, Partitioner, make_mesh
from praxis_lite.inputs import PreferenceData
from praxis_lite.layers import (
    StochasticResidual,
    adapted,
    reference_of,
    rotary_lm,
    set_sharding_params,
    with_reference,
)
from praxis_lite.optimizers import VariationalNoise
from praxis_lite.tasks.preference import DpoTask
from praxis_lite.trainer.forward_pass import forward_pass
from tests.support.marks import nightly_but, slow_but

BETA, SMOOTHING = 0.3, 0.1
KINDS = ("copy", "adapters")


def model_of(kind):
    """Returns the config of a model, and the learner's settings for it."""
    model = rotary_lm(
        vocab_size=257, model_dims=10, hidden_dims=14, num_heads=2, dim_per_head=6, num_layers=2
    )
    frozen = {}
    if kind == "adapters":
        block = model.transformer_layer_tpl
        block.tr_atten_tpl = fdl.Partial(adapted, base_tpl=block.tr_atten_tpl, rank=3)
        frozen = {"bprop_variable_inclusion": r".*/lora_[ab]$"}
    model = set_sharding_params(model)
    if kind == "copy":
        model = fdl.Partial(with_reference, base_tpl=model)
        frozen = {"bprop_variable_exclusion": "reference/.*"}
    return model, frozen


def task_of(kind):
    model, frozen = model_of(kind)
    learner = Learner(functools.partial(optax.adam), 0.05, **frozen)
    return DpoTask(
        fdl.build(model),
        learner,
        beta=BETA,
        label_smoothing=SMOOTHING,
        inputs_split_mapping={
            "map_1d": ("data",),
            "map_2d": ("data", None),
            "map_3d": ("data", None, None),
        },
    )


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Pairs of short texts, with answers of different lengths."""
    lines = [
        {"prompt": f"What comes after {n}?", "chosen": f"{n + 1} comes.", "rejected": "no" * n}
        for n in range(1, 14)
    ]
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return PreferenceData(str(path), "train", 6, 53, shuffle=True, heldout_percent=0)


@functools.cache
def trained(kind, shape, data):
    """Returns the partitioner, first weights, batches, and three steps' metrics and state."""
    mesh = make_mesh(MeshConfig(ici_mesh_shape=shape, allow_unused_devices=True))
    partitioner = Partitioner(task_of(kind), mesh)
    batches = [data.rows(index, slice(0, 6)) for index in range(3)]
    for batch in batches:
        batch["weights"][4:] = 0.0  # Filler.
    state = partitioner.init(partitioner.key(0))
    before = jax.device_get(state.mdl_vars["params"])
    metrics = []
    for index, batch in enumerate(batches):
        state, outputs = partitioner.train_step(
            state, partitioner.global_batch(batch), partitioner.batch_key(0, 0, index)
        )
        metrics.append({name: float(value) for name, (value, _) in outputs["metrics"].items()})
    return partitioner, before, batches, metrics, state


def log_probs(logits, batch):
    """Returns the log-probability of each answer, in NumPy, float64."""
    logits = logits.astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    chosen = np.take_along_axis(logp, batch["labels"][..., None], -1)[..., 0]
    return (chosen * batch["answers"]).sum(-1)


@pytest.mark.parametrize("kind", nightly_but({"copy"}, KINDS))
def test_the_loss_is_that_of_the_paper(kind, pairs):
    partitioner, before, batches, metrics, state = trained(kind, (1, 1, 1), pairs)
    # Nothing was learned before the first step: both models are one, but for rounding.
    first = metrics[0]
    assert first["loss"] == pytest.approx(np.log(2.0), abs=1e-4)
    assert first["rewards/margins"] == pytest.approx(0.0, abs=1e-4)
    batch, forward = batches[0], forward_pass(partitioner)
    ids = batch["ids"].reshape(12, -1)
    shape = batch["ids"].shape
    now = log_probs(np.asarray(forward(state.mdl_vars, ids)[0]).reshape(*shape, -1), batch)
    start = jax.tree.map(jax.numpy.asarray, {**state.mdl_vars, "params": before})
    then = log_probs(np.asarray(forward(start, ids)[0]).reshape(*shape, -1), batch)
    rewards = (BETA * (now - then))[:4]
    margins = rewards[:, 0] - rewards[:, 1]
    loss = np.logaddexp(0, -margins) * (1 - SMOOTHING) + np.logaddexp(0, margins) * SMOOTHING
    actual = partitioner.eval_step(
        state.mdl_vars, partitioner.global_batch(batch), partitioner.key(0)
    )
    expected = {
        "loss": loss,
        "rewards/chosen": rewards[:, 0],
        "rewards/rejected": rewards[:, 1],
        "rewards/margins": margins,
        "rewards/accuracies": margins > 0,
    }
    assert np.abs(rewards).max() > 0.01
    for name, values in expected.items():
        assert float(actual[name][0]) == pytest.approx(values.mean(), rel=1e-4, abs=1e-5), name
        assert float(actual[name][1]) == 4


def test_the_reference_is_the_copy_or_the_model_without_adapters():
    module = task_of("copy").model.abstract_module()
    assert reference_of(module) is module.reference
    module = task_of("adapters").model.abstract_module()
    names = [path[-1] for path, _ in nnx.to_flat_state(nnx.state(reference_of(module)))]
    assert "w" in names and "lora_a" not in names


@pytest.mark.parametrize("kind", slow_but({"copy"}, KINDS))
def test_the_reference_stays_and_the_rest_learns(kind, pairs):
    _, before, _, metrics, state = trained(kind, (1, 1, 1), pairs)
    after = jax.device_get(state.mdl_vars["params"])
    changed = {
        jax.tree_util.keystr(path, simple=True, separator="/"): not np.array_equal(a, b)
        for (path, a), b in zip(
            jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True
        )
    }
    learns = (
        (lambda path: "lora_" in path)
        if kind == "adapters"
        else (lambda path: not path.startswith("reference/"))
    )
    assert all(changed[path] == learns(path) for path in changed), changed
    assert sum(changed.values()) and not all(changed.values())
    assert metrics[2]["loss"] != metrics[0]["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", nightly_but({"adapters"}, KINDS))
def test_a_mesh_gives_the_same(kind, pairs):
    *_, expected, _ = trained(kind, (1, 1, 1), pairs)
    *_, actual, _ = trained(kind, (1, 4, 2), pairs)
    # Margins of the first step are rounding, which is not taken for right.
    assert actual[0]["rewards/accuracies"] == 0
    for a, b in zip(actual, expected, strict=True):
        assert a == pytest.approx(b, rel=1e-3, abs=1e-4)


def test_a_model_without_a_reference_is_refused(pairs):
    partitioner = Partitioner(
        task_of("none"), make_mesh(MeshConfig(ici_mesh_shape=(1, 1, 1), allow_unused_devices=True))
    )
    spec = pairs.element_spec()
    with pytest.raises(ConfigError, match="TransformerLm.*with_reference"):
        partitioner.train_step.trace(spec)


def test_packed_pairs_are_refused():
    with pytest.raises(ConfigError, match="DpoTask.*segment_ids"):
        task_of("none").compute_loss(None, {"segment_ids": np.ones((2, 2, 3), np.int32)}, None)


class Dropped(nnx.Module):
    """A language model of a user, with Flax's own dropout or layers that take a key."""

    def __init__(self, kind, *, rngs):
        self.table = nnx.Param(jax.random.normal(rngs.params(), (257, 257)))
        self.drop = (
            nnx.Dropout(0.5, rngs=rngs) if kind == "nnx" else StochasticResidual(survival_prob=0.5)
        )

    def compute_loss(self, ids, labels, weights, key=None):
        x = self.table[...][ids]
        x = self.drop(x) if isinstance(self.drop, nnx.Dropout) else self.drop(x, x, key)
        logp = jax.nn.log_softmax(x)
        chosen = jnp.take_along_axis(logp, labels[..., None], -1)[..., 0]
        return {"per_sequence_xent": -jnp.sum(chosen * weights, axis=-1)}


@pytest.mark.parametrize(
    "kind",
    slow_but({"nnx", "stochastic depth"}, ["copy", "adapters", "nnx", "stochastic depth"]),
)
def test_both_models_run_without_dropout_so_that_margins_begin_at_0(kind, pairs):
    if kind in KINDS:
        model, _ = model_of(kind)
        block = (model.base_tpl if kind == "copy" else model).transformer_layer_tpl
        for name in ("atten", "residual", "relu"):
            setattr(block, f"{name}_dropout_prob", 0.5)
        block.residual_droppath_prob = 0.5
        model = fdl.build(model)
    else:
        model = functools.partial(with_reference, kind, base_tpl=Dropped)
    task = DpoTask(model, Learner(optax.sgd, 0.1), beta=BETA)
    batch = pairs.rows(0, slice(0, 6))

    @jax.jit
    def margins(key):
        module = task.module(task.model.init(jax.random.key(0)), key)
        return task.compute_loss(module, batch, key)["rewards/margins"][0]

    assert abs(margins(jax.random.key(3))) < 1e-6


def test_noise_on_one_of_the_two_models_is_refused():
    learner = Learner(optax.sgd, 0.1, variational_noise=VariationalNoise(0.1, regex=".*"))
    with pytest.raises(ConfigError, match=r"DpoTask\.learner\.variational_noise"):
        DpoTask(functools.partial(with_reference, "nnx", base_tpl=Dropped), learner)
