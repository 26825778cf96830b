"""Pipelines of small blocks beside the Repeat of the same blocks: outputs and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from praxis_lite.core import MeshConfig, NnxModel, constrain, make_mesh
from praxis_lite.layers import BaseLayer, Pipeline, Repeat
from praxis_lite.layers.base.base_layer import zeros
from praxis_lite.layers.stacking.pipelines import stack_shape, to_repeated, to_stack_shape

# R repeats, S stages, P layers of one stage in one repeat, M microbatches.


class Block(BaseLayer):
    """A residual block that uses every kind of input: per row, for all rows, none, dropout."""

    def __init__(self, dims, hidden_dims, *, rngs):
        self.w = self.weight((dims, hidden_dims), (None, "mdl"), rngs=rngs)
        self.b = self.weight((hidden_dims,), ("mdl",), init=zeros, rngs=rngs)
        self.out = self.weight((hidden_dims, dims), ("mdl", None), rngs=rngs)

    def __call__(self, x, *, key=None, cache=None, positions=None, encoded=None, scale=1.0, **_):
        hidden = x @ self.w[...].astype(x.dtype) + self.b[...].astype(x.dtype)[None]
        hidden = constrain(hidden, ("data", "mdl"))
        if positions is not None:
            hidden += jnp.sin(positions.astype(x.dtype))
        if encoded is not None:
            hidden *= jnp.mean(jnp.cos(encoded), axis=1).astype(x.dtype)
        if key is not None:
            hidden *= jax.random.bernoulli(key, 0.5, hidden.shape).astype(x.dtype)
        out = jnp.tanh(hidden) @ self.out[...].astype(x.dtype)
        return constrain(x + scale * out, ("data", None)), cache


# name: R, S, P, M, rows, dims, hidden dims. Two data and two mdl devices divide the even sizes.
CASES = {
    "gpipe": (1, 2, 2, 4, 16, 8, 12),
    "gpipe_fewer_microbatches_than_stages": (1, 4, 1, 2, 8, 8, 12),
    "gpipe_uneven": (1, 3, 2, 5, 15, 7, 11),
    "circular": (2, 2, 1, 2, 8, 8, 12),
    "circular_waiting": (2, 2, 2, 4, 16, 8, 12),
    "circular_uneven": (3, 3, 1, 7, 21, 7, 11),
}
# The others are run on a mesh.
IN_TICKS = [
    "gpipe_fewer_microbatches_than_stages",
    "circular",
    "circular_uneven",
]


def settings(case, **changed):
    repeats, stages, _, microbatches, *_ = CASES[case]
    given = dict(num_stages=stages, num_microbatches=microbatches, circular_repeat=repeats)
    return dict(given, activation_split_dims_mapping=("data", None), pipelined=True) | changed


def sizes(case):
    repeats, stages, per_stage, _, rows, dims, hidden_dims = CASES[case]
    return repeats * stages * per_stage, rows, dims, hidden_dims


def repeat_model(case):
    num_layers, _, dims, hidden_dims = sizes(case)
    block = functools.partial(Block, dims, hidden_dims)
    return NnxModel(lambda rngs: Repeat(block, num_layers, rngs=rngs))


def pipeline_model(case, **changed):
    num_layers, _, dims, hidden_dims = sizes(case)
    block = functools.partial(Block, dims, hidden_dims)
    return NnxModel(
        lambda rngs: Pipeline(block, num_layers, **settings(case, **changed), rngs=rngs)
    )


def drawn(model, seed=1):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda w: jnp.asarray(rng.normal(scale=0.4, size=w.shape), jnp.float32),
        jax.eval_shape(model.init, jax.random.key(0))["params"],
    )


def data(case, dtype=jnp.float32):
    _, rows, dims, hidden_dims = sizes(case)
    rng = np.random.default_rng(2)
    return {
        "x": jnp.asarray(rng.normal(size=(rows, dims)), dtype),
        "encoded": jnp.asarray(rng.normal(size=(rows, 3, hidden_dims)), dtype),
        "positions": jnp.asarray(rng.integers(0, 9, (rows, 1)), jnp.int32),
    }


def program(model, key=None, mesh=None):
    """Returns a function of (params, data) that gives outputs and gradients."""

    def objective(params, given):
        given = dict(given)
        x = given.pop("x")
        module = model.module({"params": params, "non_trainable": {}})
        outputs = module(x, key=key, **given, scale=0.7, paddings=None)[0]
        return jnp.sum(jnp.sin(outputs.astype(jnp.float32))), outputs

    def run(params, given):
        ints = {"positions": given["positions"]}
        floats = {name: a for name, a in given.items() if name not in ints}
        grads, outputs = jax.grad(
            lambda params, floats: objective(params, {**floats, **ints}),
            argnums=(0, 1),
            has_aux=True,
        )(params, floats)
        return {"outputs": outputs, "params": grads[0], "inputs": grads[1]}

    if mesh is None:
        return run

    def run_on_mesh(params, given):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return run(params, given)

    return run_on_mesh


def from_repeated(params, *, num_stages, circular_repeat=1):
    """Returns the variables of a Repeat [L, ...] in the layout of a Pipeline."""
    num_layers = jax.tree.leaves(params)[0].shape[0]
    return to_stack_shape(params, stack_shape(num_layers, num_stages, circular_repeat))


def from_case(params, case):
    repeats, stages, *_ = CASES[case]
    return from_repeated(params, num_stages=stages, circular_repeat=repeats)


@functools.cache
def repeated(case):
    """Returns the parameters, [L, ...], and what a Repeat makes of them."""
    model = repeat_model(case)
    params = drawn(model)
    return params, jax.jit(program(model))(params, data(case))


@functools.cache
def pipelined(case, **changed):
    params = from_case(repeated(case)[0], case)
    actual = jax.jit(program(pipeline_model(case, **changed)))(params, data(case))
    return {**actual, "params": to_repeated(actual["params"])}


def assert_trees_close(actual, expected, **tolerance):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), **tolerance
        )


MESH_AXES = ("stage", "data", "mdl")


def replicated(mesh, tree):
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))


@functools.cache
def on_mesh(case, **changed):
    """Returns the results of the pipeline on a (2, 2, 2) mesh, and its compiled program."""
    mesh = make_mesh(MeshConfig(ici_mesh_shape=(2, 2, 2), axis_names=MESH_AXES))
    model = pipeline_model(case, pipelined=None, **changed)
    run = program(model, mesh=mesh)
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec.partition_spec(MESH_AXES, "")),
        model.weight_specs()["params"],
        is_leaf=lambda x: hasattr(x, "stack_shape"),
    )

    @jax.jit
    def placed(params, given):
        # Inside: uneven sizes cannot be placed from outside.
        params = jax.lax.with_sharding_constraint(params, shardings)
        actual = run(params, given)
        params = jax.lax.with_sharding_constraint(actual["params"], shardings)
        return {**actual, "params": to_repeated(params)}

    params, given = from_case(repeated(case)[0], case), data(case)
    given = replicated(mesh, given)
    compiled = placed.lower(params, given).compile()
    return placed(params, given), compiled
