"""Every optimizer on meshes: one device's weights and slots, padding, aliasing, a restore.

All models train together, each with a separate auxiliary optimizer, because a single compilation
per mesh takes much less time than one per optimizer.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from praxis_lite import Task
from praxis_lite.checkpoints.checkpoints import Checkpoints
from praxis_lite.checkpoints.steps.save_settings import SaveSettings
from praxis_lite.core import (
    AuxiliaryOptimizer,
    Learner,
    MeshConfig,
    Partitioner,
    TrainState,
    make_mesh,
)
from praxis_lite.core.partitioner import steps
from praxis_lite.layers import BaseLayer
from praxis_lite.layers.base.variables import stacked
from praxis_lite.optimizers import (
    adafactor,
    adam,
    lion,
    low_precision_slots,
    muon_matrices,
    soap,
)
from praxis_tools.explain import hlo
from tests.support.lm_runs import on_host, zero_padded

pytestmark = pytest.mark.slow

# Mesh shape, and the axes that shard slots in addition to the axes of their weights.
RUNS = {"uneven": ((1, 4, 2), ()), "zero1": ((1, 2, 4), ("data",))}
NUM_LAYERS, NUM_STEPS, SAVED_STEP = 2, 5, 2
SIZES = dict(vocab_size=17, model_dims=7, hidden_dims=11)  # Not divisible by any mesh axis.
NUM_ROWS = 13

_pow = functools.partial(
    adafactor, decay_method="pow", decay_pow=0.8, beta1=0.9, min_dim_size_to_factor=2
)
_muon = functools.partial(
    optax.contrib.muon, consistent_rms=0.2, muon_weight_dimension_numbers=muon_matrices()
)
OPTIMIZERS = {
    "sgd": optax.sgd,
    "momentum": functools.partial(optax.sgd, momentum=0.9),
    "nesterov": functools.partial(optax.sgd, momentum=0.9, nesterov=True),
    "adagrad": optax.adagrad,
    "adam": optax.adam,
    "adamw": functools.partial(optax.adamw, weight_decay=0.1),
    "pax_adam": functools.partial(adam, clip_threshold=0.5, weight_decay=0.1),
    "optax_adafactor": functools.partial(optax.adafactor, min_dim_size_to_factor=2, momentum=0.9),
    "adafactor_float32": functools.partial(
        _pow, quantized_dtype="float32", multiply_by_parameter_scale=True
    ),
    "adafactor_bfloat16": functools.partial(_pow, quantized_dtype="bfloat16"),
    "adafactor_int8": functools.partial(
        _pow, decay_method="adam", decay_adam=0.99, layerwise_adaptation=True
    ),
    "adafactor_whole": functools.partial(_pow, factored=False),
    "lamb": functools.partial(optax.lamb, weight_decay=0.1),
    "lars": functools.partial(optax.lars, weight_decay=0.1, trust_coefficient=0.1),
    "lion": lion,
    "soap": functools.partial(soap, precondition_frequency=2, max_precond_dim=8),
    "muon": _muon,
    "schedule_free": functools.partial(optax.contrib.schedule_free_adamw, weight_decay=0.1),
    "low_precision": functools.partial(low_precision_slots, optimizer=optax.adamw),
    # A model with two optimizers and frozen weights.
    "two": optax.adamw,
    "partly_frozen": optax.adamw,
}
FROZEN = "partly_frozen/(emb_var|blocks/b)"


class Tiny(BaseLayer):
    """An embedding that is also the softmax, and blocks in a stack."""

    def __init__(self, vocab_size, model_dims, hidden_dims, data_axis, *, rngs):
        self.emb_var = self.weight((vocab_size, model_dims), ("mdl", data_axis), rngs=rngs)
        block = functools.partial(TinyBlock, model_dims, hidden_dims, data_axis)
        keys = jax.random.split(rngs(), NUM_LAYERS)
        self.blocks = stacked(jax.vmap(lambda key: block(rngs=nnx.Rngs(key)))(keys), None)

    def __call__(self, ids):
        blocks, x = self.blocks, self.emb_var[...][ids]
        hidden = jnp.tanh(jnp.einsum("bd,ldh->blh", x, blocks.w[...]) + blocks.b[...][None])
        x = x + jnp.einsum("blh,ldh->bd", hidden, blocks.w[...])
        return jax.nn.log_softmax(x @ self.emb_var[...].T)


class TinyBlock(BaseLayer):
    def __init__(self, model_dims, hidden_dims, data_axis, *, rngs):
        self.w = self.weight((model_dims, hidden_dims), (data_axis, "mdl"), rngs=rngs)
        self.b = self.weight((hidden_dims,), ("mdl",), rngs=rngs)


class Models(BaseLayer):
    """One model per optimizer."""

    def __init__(self, *args, rngs):
        for name in OPTIMIZERS:
            setattr(self, name, Tiny(*args, rngs=rngs))


class TinyTask(Task):
    """Computes the sum of the models' cross-entropies."""

    def compute_loss(self, model, inputs, key):
        # Compute all models in one function, to compile only once.
        models = [getattr(model, name) for name in OPTIMIZERS]
        together = jax.tree.map(lambda *weights: jnp.stack(weights), *models)
        log_probs = jax.vmap(lambda item: item(inputs["ids"]))(together)
        of_labels = jax.nn.one_hot(inputs["labels"], log_probs.shape[-1])
        num_rows = len(inputs["ids"])
        loss = -jnp.einsum("nbv,bv->", log_probs, of_labels) / num_rows
        return {"loss": (loss, jnp.float32(num_rows))}


def task_of(slot_mesh_axes=()):
    main, *others = OPTIMIZERS
    learner = Learner(
        OPTIMIZERS[main],
        _rate,
        auxiliary_optimizers=[
            *(
                AuxiliaryOptimizer(
                    f"{name}/(emb_var|blocks/b)" if name == "two" else f"{name}/",
                    OPTIMIZERS[name],
                    _rate,
                    name,
                )
                for name in others
            ),
            AuxiliaryOptimizer("two/blocks/w", _muon, _rate, "two_matrices"),
        ],
        bprop_variable_exclusion=FROZEN,
        ema_decay=0.9,
        slot_mesh_axes=slot_mesh_axes,
    )
    # ZeRO-1 requires weights that are not sharded over the data axis.
    data_axis = None if slot_mesh_axes else "data"
    return TinyTask(
        functools.partial(Models, *SIZES.values(), data_axis),
        learner,
        inputs_split_mapping={"map_1d": (("replica", "data"),)},
    )


def _rate(count):
    return 0.02 / (1.0 + count)


def batches():
    rng = np.random.default_rng(11)
    draw = functools.partial(rng.integers, SIZES["vocab_size"], size=NUM_ROWS, dtype=np.int32)
    return [{"ids": draw(), "labels": draw()} for _ in range(NUM_STEPS)]


@functools.cache
def one_device():
    """Returns the states before and after each step of a run without a mesh, as NumPy arrays."""
    task = task_of()
    rng = np.random.default_rng(12)
    mdl_vars = jax.tree.map(
        lambda x: rng.normal(scale=0.5, size=x.shape).astype(x.dtype),
        jax.eval_shape(lambda: task.model.init(jax.random.key(0))),
    )
    bound = task.learner.bind(task.model.weight_specs()["params"])
    opt_states = jax.jit(bound.init)(mdl_vars["params"])
    history = [TrainState(np.int32(0), mdl_vars, opt_states)]
    step = jax.jit(lambda *args: steps.train_step(task, *args)[0])
    for batch in batches():
        history.append(step(history[-1], batch, jax.random.key(0)))
    return jax.device_get(history)


class Run(NamedTuple):
    partitioner: Partitioner
    step: jax.stages.Compiled
    saved: TrainState  # The state on the mesh after SAVED_STEP
    last: TrainState


@functools.cache
def trained(name):
    """Trains on a mesh, starting from the initial weights and slots of `one_device`."""
    shape, slot_mesh_axes = RUNS[name]
    partitioner = Partitioner(task_of(slot_mesh_axes), make_mesh(MeshConfig(ici_mesh_shape=shape)))
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batches()[0])
    step = partitioner.train_step.lower(structs).compile()
    padded = jax.tree.map(zero_padded, one_device()[0], partitioner.layout.padded_shapes)
    state = jax.device_put(padded, partitioner.layout.shardings(partitioner.mesh))
    state = continued(partitioner, step, state, 0, SAVED_STEP)
    saved = jax.tree.map(lambda x: x.copy(), state)  # The next step donates the state.
    last = continued(partitioner, step, state, SAVED_STEP, NUM_STEPS)
    return Run(partitioner, step, saved, last)


def continued(partitioner, step, state, first, last):
    for batch in batches()[first:last]:
        state, _ = step(state, partitioner.global_batch(batch), partitioner.key(0))
    return state


# Slots rounded to few bits may fall to either side, by what XLA sums first; eigenvectors differ by
# rounding over the gap between two eigenvalues. Weights follow, by a rate of 0.02.
ROUGH = ("adafactor_int8", "adafactor_bfloat16", "lion", "low_precision", "soap")


def assert_same(actual, expected):
    """Checks two states in NumPy, of true shapes."""
    paths, treedef = jax.tree_util.tree_flatten_with_path(actual)
    assert treedef == jax.tree.structure(expected)
    far = []
    for (path, a), b in zip(paths, jax.tree.leaves(expected), strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        a, b, dtype = a.astype(np.float32), b.astype(np.float32), str(a.dtype)
        rtol, atol = {"int8": (0, 1), "bfloat16": (2**-7, 1e-6)}.get(dtype, (1e-5, 2e-6))
        if any(f"/{rough}{end}" in name for rough in ROUGH for end in "./"):
            atol = max(atol, 1e-3)
        if not np.allclose(a, b, rtol=rtol, atol=atol * max(1.0, np.abs(b).max(initial=0))):
            far.append(f"{name} {dtype}: {np.abs(a - b).max():.2g} of {np.abs(b).max():.2g}")
    assert not far, "\n".join(far)


every_run = pytest.mark.parametrize(
    "name", ["uneven", pytest.param("zero1", marks=pytest.mark.nightly)]
)


@every_run
def test_five_steps_are_those_of_one_device(name):
    run = trained(name)
    assert_same(on_host(run.partitioner.layout, run.last), one_device()[-1])


def test_every_optimizer_moves_all_its_weights_and_no_frozen_one():
    before, after = one_device()[0], one_device()[-1]
    for name in OPTIMIZERS:
        old, new = (state.mdl_vars["params"][name] for state in (before, after))
        moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), old, new)
        moved = {"emb_var": moved["emb_var"], **moved["blocks"]}
        still = {weight for weight, change in moved.items() if change == 0}
        assert still == ({"emb_var", "b"} if name == "partly_frozen" else set()), name
        assert max(moved.values()) < 0.5, name
    assert int(after.opt_states["num_skipped_steps"]) == 0


@every_run
def test_padding_is_zero_in_every_slot(name):
    run = trained(name)
    num_padded = 0
    for leaf, x in zip(run.partitioner.layout.leaves(), jax.tree.leaves(run.last), strict=True):
        assert x.shape == leaf.padded_shape, leaf.path
        outside = np.ones(x.shape, bool)
        outside[tuple(slice(dim) for dim in leaf.shape)] = False
        assert np.all(np.asarray(x)[outside] == 0), leaf.path
        num_padded += outside.any() and "/slots/" in leaf.path
    assert num_padded > 2 * len(OPTIMIZERS)


@every_run
def test_every_donated_byte_is_aliased(name):
    run = trained(name)
    leaves = list(run.partitioner.layout.leaves())
    assert hlo.num_donated(run.step) == len(leaves)
    assert hlo.donated_bytes(run.step) == sum(leaf.bytes_per_device for leaf in leaves)


@pytest.mark.nightly
def test_saved_on_one_mesh_and_restored_on_another_it_goes_on_as_it_would_have(tmp_path):
    saved, other = trained("uneven"), trained("zero1")
    with Checkpoints(tmp_path, saving=SaveSettings(max_to_keep=1)) as checkpoints:
        checkpoints.save(SAVED_STEP, saved.saved, saved.partitioner.layout, {})
    with Checkpoints(tmp_path) as checkpoints:
        restored = checkpoints.restore(other.partitioner.layout, other.partitioner.mesh)
    assert restored.step == SAVED_STEP
    jax.tree.map(
        np.testing.assert_array_equal,
        on_host(other.partitioner.layout, restored.state),
        on_host(saved.partitioner.layout, saved.saved),
    )
    state = continued(other.partitioner, other.step, restored.state, SAVED_STEP, NUM_STEPS)
    assert_same(on_host(other.partitioner.layout, state), one_device()[-1])


@pytest.mark.nightly
def test_slots_lie_over_the_data_axis():
    specs = {leaf.path: leaf.spec for leaf in trained("zero1").partitioner.layout.leaves()}
    w = "adamw/blocks/w"
    assert specs[f"mdl_vars/params/{w}"] == P(None, None, "mdl")
    for slot in ("ema", "slots/adamw.stack_2/0/mu", "slots/adamw.stack_2/0/nu"):
        assert specs[f"opt_states/{slot}/{w}"] == P(None, "data", "mdl")
