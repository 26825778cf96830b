"""Every optimizer on every mesh: one device's weights and slots, padding, aliasing, a restore.

All optimizers train at once, each a model of its own by its own auxiliary optimizer: one program
per mesh, for compiling is what takes the time.
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

from praxis_lite import hlo, steps
from praxis_lite.checkpoints import Checkpoints
from praxis_lite.learner import Learner
from praxis_lite.optimizer_groups import AuxiliaryOptimizer
from praxis_lite.optimizers import (
    adafactor,
    adam,
    lion,
    low_precision_slots,
    muon_matrices,
    soap,
)
from praxis_lite.partitioner import Partitioner
from praxis_lite.sharding import MeshConfig, make_mesh
from praxis_lite.task import Task
from praxis_lite.train_state import TrainState
from praxis_lite.weights import BaseLayer, stacked
from tests.lm_runs import on_host, zero_padded

pytestmark = pytest.mark.slow

MESHES = [(1, 1, 1), (1, 4, 2), (1, 2, 4)]
NUM_LAYERS, NUM_STEPS, SAVED_STEP = 2, 5, 2
SIZES = {
    "even": dict(vocab_size=16, model_dims=8, hidden_dims=24),
    "uneven": dict(vocab_size=17, model_dims=7, hidden_dims=11),
}
NUM_ROWS = {"even": 16, "uneven": 13}

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
    "optax_adafactor": functools.partial(
        optax.adafactor, min_dim_size_to_factor=2, momentum=0.9
    ),
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
    # Two optimizers in one model, and weights that are frozen.
    "two": optax.adamw,
    "partly_frozen": optax.adamw,
}
FROZEN = "partly_frozen/(emb_var|blocks/b)"

# Slots rounded to few bits may fall to either side, by what XLA sums first; eigenvectors differ by
# rounding over the gap between two eigenvalues. Weights follow, by a rate of 0.02.
ROUGH = ("adafactor_int8", "adafactor_bfloat16", "lion", "low_precision", "soap")


class Tiny(BaseLayer):
    """An embedding that is the softmax too, and blocks side by side in one stack."""

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
    """A model per optimizer."""

    def __init__(self, *args, rngs):
        for name in OPTIMIZERS:
            setattr(self, name, Tiny(*args, rngs=rngs))


class TinyTask(Task):
    """The sum of the models' cross-entropies."""

    def compute_loss(self, model, inputs, key):
        # One pass for all the models: compiled apart they would take longer than the optimizers.
        models = [getattr(model, name) for name in OPTIMIZERS]
        together = jax.tree.map(lambda *weights: jnp.stack(weights), *models)
        log_probs = jax.vmap(lambda one: one(inputs["ids"]))(together)
        of_labels = jax.nn.one_hot(inputs["labels"], log_probs.shape[-1])
        num_rows = len(inputs["ids"])
        loss = -jnp.einsum("nbv,bv->", log_probs, of_labels) / num_rows
        return {"loss": (loss, jnp.float32(num_rows))}


def task_of(size, slot_mesh_axes=()):
    main, *others = OPTIMIZERS
    learner = Learner(
        OPTIMIZERS[main],
        _rate,
        auxiliary_optimizers=[
            *(
                AuxiliaryOptimizer(
                    f"{name}/(emb_var|blocks/b)" if name == "two" else f"{name}/",
                    OPTIMIZERS[name], _rate, name,
                )
                for name in others
            ),
            AuxiliaryOptimizer("two/blocks/w", _muon, _rate, "two_matrices"),
        ],
        bprop_variable_exclusion=FROZEN,
        ema_decay=0.9,
        slot_mesh_axes=slot_mesh_axes,
    )
    # ZeRO-1 is for weights that the data axis does not split.
    data_axis = None if slot_mesh_axes else "data"
    return TinyTask(
        functools.partial(Models, *SIZES[size].values(), data_axis),
        learner,
        inputs_split_mapping={"map_1d": (("replica", "data"),)},
    )


def _rate(count):
    return 0.02 / (1.0 + count)


def batches(size):
    rng, rows = np.random.default_rng(11), NUM_ROWS[size]
    draw = functools.partial(rng.integers, SIZES[size]["vocab_size"], size=rows, dtype=np.int32)
    return [{"ids": draw(), "labels": draw()} for _ in range(NUM_STEPS)]


@functools.cache
def one_device(size):
    """Returns the states of a run without a mesh, before and after each step, in NumPy."""
    task = task_of(size)
    rng = np.random.default_rng(12)
    mdl_vars = jax.tree.map(
        lambda x: rng.normal(scale=0.5, size=x.shape).astype(x.dtype),
        jax.eval_shape(lambda: task.model.init(jax.random.key(0))),
    )
    specs = task.model.weight_specs()["params"]
    opt_states = jax.jit(lambda params: task.learner.init(params, specs))(mdl_vars["params"])
    history = [TrainState(np.int32(0), mdl_vars, opt_states)]
    step = jax.jit(lambda *args: steps.train_step(task, *args)[0])
    for one in batches(size):
        history.append(step(history[-1], one, jax.random.key(0)))
    return jax.device_get(history)


class Run(NamedTuple):
    partitioner: Partitioner
    step: jax.stages.Compiled
    saved: TrainState  # of step SAVED_STEP, on the mesh
    last: TrainState


@functools.cache
def trained(size, shape, slot_mesh_axes=()):
    """Returns a run that starts from the weights and slots of `one_device`."""
    partitioner = Partitioner(
        task_of(size, slot_mesh_axes), make_mesh(MeshConfig(ici_mesh_shape=shape))
    )
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batches(size)[0])
    step = partitioner.lower("train", structs).compile()
    padded = jax.tree.map(zero_padded, one_device(size)[0], partitioner.layout.padded_shapes)
    state = jax.device_put(padded, partitioner.layout.shardings(partitioner.mesh))
    state = continued(partitioner, step, state, size, 0, SAVED_STEP)
    saved = jax.tree.map(lambda x: x.copy(), state)  # The next step donates.
    return Run(
        partitioner, step, saved, continued(partitioner, step, state, size, SAVED_STEP, NUM_STEPS)
    )


def continued(partitioner, step, state, size, first, last):
    for one in batches(size)[first:last]:
        state, _ = step(state, partitioner.global_batch(one), partitioner.key(0))
    return state


def assert_same(found, wanted):
    """Checks two states in NumPy, of true shapes."""
    paths, treedef = jax.tree_util.tree_flatten_with_path(found)
    assert treedef == jax.tree.structure(wanted)
    far = []
    for (path, a), b in zip(paths, jax.tree.leaves(wanted), strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        a, b, dtype = a.astype(np.float32), b.astype(np.float32), str(a.dtype)
        rtol, atol = {"int8": (0, 1), "bfloat16": (2**-7, 1e-6)}.get(dtype, (1e-5, 2e-6))
        if any(f"/{rough}{end}" in name for rough in ROUGH for end in "./"):
            atol = max(atol, 1e-3)
        if not np.allclose(a, b, rtol=rtol, atol=atol * max(1.0, np.abs(b).max(initial=0))):
            far.append(f"{name} {dtype}: {np.abs(a - b).max():.2g} of {np.abs(b).max():.2g}")
    assert not far, "\n".join(far)


every_run = pytest.mark.parametrize("shape", MESHES, ids=str)
every_size = pytest.mark.parametrize("size", SIZES)


@every_size
@every_run
def test_five_steps_are_those_of_one_device(size, shape):
    run = trained(size, shape)
    assert_same(on_host(run.partitioner.layout, run.last), one_device(size)[-1])


@every_size
def test_every_optimizer_moves_all_its_weights_and_no_frozen_one(size):
    before, after = one_device(size)[0], one_device(size)[-1]
    for name in OPTIMIZERS:
        old, new = (state.mdl_vars["params"][name] for state in (before, after))
        moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), old, new)
        moved = {"emb_var": moved["emb_var"], **moved["blocks"]}
        still = {weight for weight, change in moved.items() if change == 0}
        assert still == ({"emb_var", "b"} if name == "partly_frozen" else set()), name
        assert max(moved.values()) < 0.5, name
    assert int(after.opt_states["num_skipped_steps"]) == 0


@every_size
@every_run
def test_padding_is_zero_in_every_slot(size, shape):
    run = trained(size, shape)
    num_padded = 0
    for leaf, x in zip(run.partitioner.layout.leaves(), jax.tree.leaves(run.last), strict=True):
        assert x.shape == leaf.padded_shape, leaf.path
        outside = np.ones(x.shape, bool)
        outside[tuple(slice(dim) for dim in leaf.shape)] = False
        assert np.all(np.asarray(x)[outside] == 0), leaf.path
        num_padded += outside.any() and "/slots/" in leaf.path
    if size == "even":
        assert num_padded == 0
    elif shape != (1, 1, 1):
        assert num_padded > 2 * len(OPTIMIZERS)


@every_size
@every_run
def test_every_donated_byte_is_aliased(size, shape):
    run = trained(size, shape)
    leaves = list(run.partitioner.layout.leaves())
    assert hlo.num_donated(run.step) == len(leaves)
    assert hlo.donated_bytes(run.step) == sum(leaf.bytes_per_device for leaf in leaves)


@every_size
@every_run
def test_saved_on_one_mesh_and_restored_on_the_next_it_goes_on_as_it_would_have(
    size, shape, tmp_path
):
    saved, other = trained(size, shape), trained(size, MESHES[MESHES.index(shape) - 1])
    with Checkpoints(tmp_path, max_to_keep=1) as checkpoints:
        checkpoints.save(SAVED_STEP, saved.saved, saved.partitioner.layout, {})
    with Checkpoints(tmp_path) as checkpoints:
        restored = checkpoints.restore(other.partitioner.layout, other.partitioner.mesh)
    assert restored.step == SAVED_STEP
    jax.tree.map(
        np.testing.assert_array_equal,
        on_host(other.partitioner.layout, restored.state),
        on_host(saved.partitioner.layout, saved.saved),
    )
    state = continued(other.partitioner, other.step, restored.state, size, SAVED_STEP, NUM_STEPS)
    assert_same(on_host(other.partitioner.layout, state), one_device(size)[-1])


def test_slots_over_the_data_axis_train_as_on_one_device():
    run = trained("uneven", (1, 4, 2), ("data",))
    leaves = list(run.partitioner.layout.leaves())
    specs = {leaf.path: leaf.spec for leaf in leaves}
    w = "adamw/blocks/w"
    assert specs[f"mdl_vars/params/{w}"] == P(None, None, "mdl")
    for slot in ("ema", "slots/adamw.stack_2/0/mu", "slots/adamw.stack_2/0/nu"):
        assert specs[f"opt_states/{slot}/{w}"] == P(None, "data", "mdl")
    assert_same(on_host(run.partitioner.layout, run.last), one_device("uneven")[-1])
    assert hlo.donated_bytes(run.step) == sum(leaf.bytes_per_device for leaf in leaves)
