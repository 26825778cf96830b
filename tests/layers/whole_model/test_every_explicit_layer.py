"""Every layer of the library over Explicit axes: typed, with the numbers of Auto axes."""

import functools
import importlib
import inspect
import pkgutil

import jax
import numpy as np
import pytest
from flax import nnx

from praxis_lite import layers
from praxis_lite.core import MeshConfig, Partitioner, make_mesh
from praxis_lite.layers import BaseLayer
from tests.layers.whole_model.explicit_cases import AXES, CASES, EveryLayer, OfEveryLayer, batch
from tests.layers.whole_model.preset_runs import drawn
from tests.support.lm_runs import structs

NAMES = tuple(CASES)
# Bases, which compute nothing of their own.
BASES = {"BaseLayer", "Dense", "AttentionHeads", "Norm", "_LastDimNorm", "_PaddedNorm",
         "ResidualBranch"}
# Whole models with tests of their own (test_explicit_axes.py, test_explicit_families.py).
ELSEWHERE = {"Pipeline", "TransformerEncoderDecoder", "ClassificationModel"}


def partitioner_of(names: tuple[str, ...], axis_types: str) -> Partitioner:
    mesh = make_mesh(
        MeshConfig(ici_mesh_shape=(2, 2, 2), axis_names=AXES, axis_types=axis_types)
    )
    return Partitioner(OfEveryLayer(names), mesh)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_typed(name):
    partitioner = partitioner_of((name,), "explicit")
    partitioner.train_step.trace(structs(batch()))
    assert partitioner.train_step.untyped == {}


def test_no_layer_is_left_out():
    packages = pkgutil.walk_packages(layers.__path__, f"{layers.__name__}.")
    modules = [importlib.import_module(package.name) for package in packages]
    classes = {
        x for module in modules for x in vars(module).values()
        if inspect.isclass(x) and issubclass(x, BaseLayer)
    }
    model = nnx.eval_shape(lambda: EveryLayer(NAMES, rngs=nnx.Rngs(0)))
    there = {type(node) for _, node in nnx.iter_graph(model) if isinstance(node, BaseLayer)}
    assert {x.__name__ for x in classes - there} == BASES | ELSEWHERE


@functools.cache
def results(axis_types: str) -> dict:
    """Returns each layer's loss before and after a step, and the weights after it."""
    partitioner = partitioner_of(NAMES, axis_types)
    state = jax.device_put(
        drawn(partitioner), partitioner.layout.shardings(partitioner.mesh)
    )
    inputs, key = partitioner.global_batch(batch()), partitioner.key(0)
    losses = []
    for _ in range(2):
        state, outputs = partitioner.train_step(state, inputs, key)
        losses.append({name: value for name, (value, _) in outputs["metrics"].items()})
    return jax.device_get({"losses": losses, "weights": state.mdl_vars})


@pytest.mark.slow
def test_losses_and_gradients_are_those_of_auto_axes():
    actual, expected = results("explicit"), results("auto")
    for step in range(2):
        for name in NAMES:
            np.testing.assert_allclose(
                actual["losses"][step][name], expected["losses"][step][name],
                rtol=1e-5, atol=1e-6, err_msg=f"{name}, step {step}",
            )
    flat, _ = jax.tree_util.tree_flatten_with_path(actual["weights"])
    for (path, x), y in zip(flat, jax.tree.leaves(expected["weights"]), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6, err_msg=jax.tree_util.keystr(path))
