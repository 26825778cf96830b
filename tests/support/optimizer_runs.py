"""Trains tiny models with different optimizers on several meshes; the results are cached.

All models train together, each with a separate auxiliary optimizer, because a single compilation
per mesh takes much less time than one per optimizer.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from praxis_lite import Task
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
from tests.support.lm_runs import zero_padded

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
