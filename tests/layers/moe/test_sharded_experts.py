"""Mixture of experts on meshes: as on one device, and with an all-to-all each way, no more."""

import collections
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite.core import MeshConfig, NnxModel, constrain, make_mesh
from praxis_lite.core.models.model import spec_leaves
from praxis_lite.core.xla_workarounds.xla_errors import without_xla_errors
from praxis_lite.layers import AuxLoss, Summary, TransformerFeedForwardMoe, intermediates
from praxis_tools.check.asserts.layers import revealing
from praxis_tools.explain import hlo
from tests.support.marks import slow_but

AXES = ("data", "expert", "mdl")
BATCH = ("data", "expert")


@dataclasses.dataclass(frozen=True)
class Sizes:
    batch: int
    length: int
    model: int
    hidden: int
    experts: int


SIZES = {
    # The mesh (2, 2, 2) divides these, and no mesh those.
    "even": Sizes(batch=8, length=12, model=8, hidden=16, experts=8),
    "uneven": Sizes(batch=7, length=13, model=7, hidden=11, experts=5),
}
# test_sharded_presets.py has the even sizes.
RUNS = (
    ((1, 3, 2), BATCH),
    pytest.param((2, 2, 2), ("data",), marks=pytest.mark.slow),
    # One device along the tokens' axes.
    pytest.param((1, 1, 2), BATCH, marks=pytest.mark.nightly),
)
LAYERS: dict[str, dict[str, Any]] = {
    # Without slots for all: what is dropped must not depend on the mesh.
    "capacity": {
        "unadjusted_expert_capacity_factor": 0.0,
        "expert_capacity_dim": 3,
        "use_gated_activation": True,
        "moe_router_z_loss_weight": 0.1,
    },
    "dropless": {
        "dropless": True,
        "gating_func": "top_k",
        "num_experts_per_token": 3,
        "use_gated_activation": True,
        "moe_router_z_loss_weight": 0.1,
    },
    "expert_choice": {"gating_func": "expert_choice_v2"},
}
# The layers of a group are one program on each mesh.
GROUPS = {
    "capacity": ("capacity", "dropless"),
    "dropless": ("capacity", "dropless"),
    "expert_choice": ("expert_choice",),
}


def moe(sizes: Sizes, settings: dict[str, Any], batch_axes: tuple[str, ...] = BATCH) -> NnxModel:
    return NnxModel(
        functools.partial(
            TransformerFeedForwardMoe,
            sizes.model,
            sizes.hidden,
            num_experts=sizes.experts,
            weight_split_dims_mapping=("expert", "data", "mdl"),
            gate_split_dims_mapping=("data", None),
            activation_split_dims_mapping=(batch_axes, None, None),
            **settings,
        )
    )


def placed(model: NnxModel, params: Any, mesh: Any) -> Any:
    """Returns weights split as they declare."""
    if mesh is None:
        return params
    declared = spec_leaves(model.weight_specs()["params"])
    specs = [spec.partition_spec(mesh.axis_names, path) for path, spec in declared]
    leaves, treedef = jax.tree.flatten(params)
    return jax.tree.unflatten(treedef, map(jax.lax.with_sharding_constraint, leaves, specs))


def drawn(model: NnxModel, seed: int = 1) -> Any:
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda w: rng.normal(scale=0.4, size=w.shape).astype(np.float32),
        jax.eval_shape(model.init, jax.random.key(0))["params"],
    )


def mesh_of(shape: tuple[int, ...]) -> jax.sharding.Mesh:
    return make_mesh(MeshConfig(ici_mesh_shape=shape, axis_names=AXES))


@functools.cache
def results(
    names: tuple[str, ...],
    mesh_shape: tuple[int, ...] | None = None,
    batch_axes: tuple[str, ...] = BATCH,
) -> dict[str, Any]:
    """Returns outputs, losses and gradients of a group: one program, so one compilation."""
    sizes = SIZES["uneven"]
    mesh = mesh_shape and mesh_of(mesh_shape)
    models = {name: moe(sizes, LAYERS[name], batch_axes) for name in names}
    x = np.random.default_rng(2).normal(size=(sizes.batch, sizes.length, sizes.model))
    x = x.astype(np.float32)
    paddings = np.zeros(x.shape[:2], np.float32)
    paddings[1, 5:] = 1.0

    @jax.jit
    @without_xla_errors
    def run(all_params, x):
        def one(name, model):
            def objective(params, x):
                module = model.module({"params": params, "non_trainable": {}})
                y = module(constrain(x, (batch_axes, None, None)), paddings=paddings)
                aux = intermediates(module, AuxLoss)
                return revealing(y) + sum(aux.values()), {
                    "outputs": y,
                    "aux": aux,
                    "reported": intermediates(module, Summary),
                }

            params = placed(model, all_params[name], mesh)
            grads, outputs = jax.grad(objective, argnums=(0, 1), has_aux=True)(params, x)
            return {**outputs, "grads": grads}

        return {name: one(name, model) for name, model in models.items()}

    params = {name: drawn(model) for name, model in models.items()}
    if mesh is None:
        return jax.device_get(run(params, x))
    with jax.set_mesh(mesh):
        return jax.device_get(run(params, x))


@pytest.mark.parametrize("mesh_shape, batch_axes", RUNS, ids=str)
@pytest.mark.parametrize("name", slow_but({"capacity", "dropless"}, LAYERS))
def test_sharded_equals_unsharded(name, mesh_shape, batch_axes):
    """Where the tokens are not split over the experts' axis, too."""
    sharded, whole = (results(GROUPS[name], *mesh)[name] for mesh in ((mesh_shape, batch_axes), ()))
    leaves, _ = jax.tree_util.tree_flatten_with_path(sharded)
    for (path, actual), expected in zip(leaves, jax.tree.leaves(whole), strict=True):
        tolerance = 3e-6 * max(1.0, np.abs(expected).max())
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=tolerance, err_msg=str(path))


def test_what_is_dropped_is_reported():
    actual = results(GROUPS["capacity"])
    reported = actual["capacity"]["reported"]
    assert 0.1 < reported["over_capacity_ratio"] < 0.9
    assert reported["max_expert_load"] > 1.0 > reported["min_expert_load"]
    assert actual["dropless"]["reported"]["over_capacity_ratio"] == 0.0


@functools.cache
def collectives_of(name: str) -> list[hlo.Collective]:
    sizes = SIZES["even"]
    model, mesh = moe(sizes, LAYERS[name]), mesh_of((2, 2, 2))

    def loss(params, x):
        params = placed(model, params, mesh)
        module = model.module({"params": params, "non_trainable": {}})
        y = module(constrain(x, (BATCH, None, None)))
        return jnp.sum(jnp.sin(y)) + sum(intermediates(module, AuxLoss).values())

    x = np.ones((sizes.batch, sizes.length, sizes.model), np.float32)
    program = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    with jax.set_mesh(mesh):
        return hlo.collectives(program.lower(drawn(model), x).compile())


@pytest.mark.parametrize(
    ("name", "num_large", "num_small"),
    [
        # As much again in the backward pass.
        ("capacity", 4, {0}),
        # Backward tokens go again, and gradients of outputs; gradients of tokens come back. With
        # tokens go their experts, which jaxlib 0.10 keeps for the backward pass, and 0.12 sends
        # again; and backward gates, whose gradients come back.
        pytest.param("dropless", 5, {3, 4}, marks=pytest.mark.slow),
    ],
)
def test_one_all_to_all_takes_tokens_to_experts_and_one_takes_them_back(name, num_large, num_small):
    """Over the experts' axis alone."""
    kinds = collections.Counter()
    for item in collectives_of(name):
        kinds[item.kind] += item.count
        if item.kind == "all-to-all":
            assert item.group_size == 2
            kinds["large"] += item.count * (item.dims[0][-1] == SIZES["even"].model)
    assert kinds.pop("large") == num_large
    assert kinds["all-to-all"] - num_large in num_small
    # Weights are gathered over data, sums over the hidden dims reduced over mdl, scalars and
    # gradients over all; nothing of the tokens moves but by the all-to-alls.
    assert set(kinds) <= {"all-to-all", "all-gather", "all-reduce", "reduce-scatter"}


def test_an_all_to_all_moves_as_many_bytes_as_the_slots_hold():
    sizes = SIZES["even"]
    slots = sizes.batch * sizes.experts * 3  # of capacity 3
    on_a_device = 4 * slots * sizes.model // 4  # float32; split over data and experts.
    for item in collectives_of("capacity"):
        if item.kind == "all-to-all":
            assert item.bytes == on_a_device


@pytest.mark.slow
def test_a_turn_of_dropless_experts_has_a_quarter_more_slots_than_even_loads_need():
    sizes, num_chosen = SIZES["even"], LAYERS["dropless"]["num_experts_per_token"]
    choices = sizes.batch * sizes.length * num_chosen // 4  # Of a device.
    slots = -(-int(choices / 2 * 1.25) // 8) * 8  # On each of two devices, in tiles of 8.
    actual = {item.bytes for item in collectives_of("dropless") if item.kind == "all-to-all"}
    assert actual == {4 * 2 * slots * sizes.model, 4 * 2 * slots}
