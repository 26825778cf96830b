"""Dropless experts on eight devices against one: any load, any number of experts, every split."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite.core import MeshConfig, NnxModel, constrain, make_mesh
from praxis_lite.core.xla_workarounds.xla_errors import without_xla_errors
from praxis_lite.layers import TransformerFeedForwardMoe
from praxis_tools.check.asserts.layers import revealing
from tests.layers.moe.test_sharded_experts import drawn, placed
from tests.support.marks import nightly_but

AXES = ("data", "expert", "mdl")
B, T, D, F, E, K = 5, 6, 7, 11, 5, 2  # No axis divides them.
# What the router's bias adds to the logits of each expert.
LOADS = {
    "drawn": [0.0] * E,
    "two have most": [6.0, 0.0, 0.0, 5.0, 0.0],
    "two have all": [60.0, 0.0, 0.0, 59.0, 0.0],
    "one device has all": [60.0, 59.0, 0.0, 0.0, 0.0],
}
# Mesh, and the splits of weights [E, D, F] and activations [B, T, D]; further settings.
WAYS: dict[str, tuple[tuple[int, ...], tuple, tuple, dict[str, Any]]] = {
    "experts and hidden dims": ((2, 2, 2), ("expert", "data", "mdl"), (("data", "expert"),), {}),
    "more devices than experts": ((1, 8, 1), ("expert", None, None), ("expert",), {}),
    "experts over two axes": (
        (2, 4, 1),
        (("data", "expert"), None, None),
        (("data", "expert"),),
        {},
    ),
    "time": ((2, 2, 2), ("expert", ("data", "mdl"), None), (("data", "expert"), "mdl"), {}),
    "tokens whole along the experts": ((2, 4, 1), ("expert", None, None), ("data",), {}),
    "whole experts": ((4, 1, 2), (None, "data", "mdl"), ("data",), {}),
    "Pallas": (
        (2, 2, 2),
        ("expert", "data", "mdl"),
        (("data", "expert"),),
        {"expert_kernel": "megablox"},
    ),
}


def model_of(weights: tuple, activations: tuple, settings: dict[str, Any]) -> NnxModel:
    return NnxModel(
        functools.partial(
            TransformerFeedForwardMoe,
            D,
            F,
            num_experts=E,
            gating_func="top_k",
            dropless=True,
            num_experts_per_token=K,
            use_gated_activation=True,
            activation="silu",
            has_bias=True,
            weight_split_dims_mapping=weights,
            activation_split_dims_mapping=activations,
            num_shared_experts=1,
            **settings,
        )
    )


@functools.cache
def program(way: str | None) -> Any:
    """Returns a function from parameters and inputs to outputs, loads and gradients."""
    shape, weights, activations, settings = WAYS[way] if way else (None, None, None, {})
    model = model_of(weights, activations, settings)
    mesh = shape and make_mesh(MeshConfig(ici_mesh_shape=shape, axis_names=AXES))

    @jax.jit
    @without_xla_errors
    def run(params: Any, x: jax.Array) -> Any:
        def objective(params: Any, x: jax.Array) -> tuple:
            module = model.module({"params": params, "non_trainable": {}})
            y = module(constrain(x, activations))
            return revealing(y), (y, module.max_expert_load[...])

        placed_params = placed(model, params, mesh)
        return jax.grad(objective, argnums=(0, 1), has_aux=True)(placed_params, x)

    def on_mesh(*args: Any) -> Any:
        if mesh is None:
            return jax.device_get(run(*args))
        with jax.set_mesh(mesh):
            return jax.device_get(run(*args))

    return on_mesh


@functools.cache
def results(way: str | None, load: str) -> Any:
    params = drawn(model_of(None, None, {}))
    params["gate_bias"] = np.asarray(LOADS[load], np.float32)
    x = np.random.default_rng(2).normal(size=(B, T, D)).astype(np.float32)
    return program(way)(params, x)


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", nightly_but({"experts and hidden dims", "more devices than experts"}, WAYS)
)
@pytest.mark.parametrize("load", LOADS)
def test_outputs_and_gradients_equal_those_of_one_device(way, load):
    leaves, _ = jax.tree_util.tree_flatten_with_path(results(way, load))
    expected = jax.tree.leaves(results(None, load))
    for (path, actual), value in zip(leaves, expected, strict=True):
        tolerance = 3e-6 * max(1.0, np.abs(value).max())
        np.testing.assert_allclose(actual, value, rtol=1e-5, atol=tolerance, err_msg=str(path))


@pytest.mark.slow
def test_the_loads_are_as_they_say():
    loads = {load: float(results(None, load)[1][1]) for load in LOADS}
    assert loads["drawn"] < loads["two have most"] <= loads["two have all"]
    assert loads["two have all"] == pytest.approx(E / K)


@pytest.mark.slow
def test_inside_a_shard_map_that_checks_types():
    """As in ExplicitCollectives: each device has rows of its own, experts are split beside."""
    mesh = make_mesh(MeshConfig(ici_mesh_shape=(2, 2, 2), axis_names=AXES))
    model = model_of(("expert", None, "mdl"), ("expert",), {})
    params = drawn(model_of(None, None, {}))
    x = np.random.default_rng(2).normal(size=(2 * B, T, D)).astype(np.float32)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(model.module({"params": params, "non_trainable": {}})(x)))

    def on_rows(params: Any, x: jax.Array) -> jax.Array:
        return jax.lax.psum(loss(params, x), "data")

    spec = jax.sharding.PartitionSpec("data")
    mapped = jax.shard_map(
        on_rows,
        mesh=mesh,
        in_specs=(jax.sharding.PartitionSpec(), spec),
        out_specs=jax.sharding.PartitionSpec(),
        axis_names={"data"},
    )
    with jax.set_mesh(mesh):
        actual = jax.device_get(jax.jit(without_xla_errors(jax.grad(mapped)))(params, x))
    expected = jax.device_get(jax.jit(jax.grad(loss))(params, x))
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=3e-6 * max(1.0, np.abs(e).max()))
