"""Runs layers on a mesh or a single device, for tests that compare outputs and gradients."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.core.models.model import MdlVars, spec_leaves
from praxis_lite.core.models.nnx_model import NnxModel, mdl_vars_of
from praxis_lite.core.sharding.mesh import make_mesh
from praxis_lite.core.sharding.mesh_config import MeshConfig
from praxis_lite.core.xla_workarounds.xla_errors import without_xla_errors

# (build, call, x): `build(rngs=...)` returns a layer and `call(layer, x, key)` returns the layer's
# outputs.
LayerCase = tuple[Callable[..., Any], Callable[..., jax.Array], np.ndarray]


def drawn(model: NnxModel, scale: float = 0.4) -> MdlVars:
    """Returns random variables for a model, with positive variances.

    The values are drawn with NumPy, so that no init function is compiled.

    Args:
      model: Model that determines the shapes.
      scale: Standard deviation of the values.
    """
    rng = np.random.default_rng(7)

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        value = rng.normal(scale=scale, size=leaf.shape).astype(np.float32)
        return np.abs(value) + 0.5 if path[-1].key == "moving_variance" else value

    return jax.tree.map_with_path(draw, jax.eval_shape(model.init, jax.random.key(0)))


def revealing(outputs: jax.Array) -> jax.Array:
    """Returns a scalar loss whose gradient is nonzero even in the padding of uneven shards.

    Use this loss to test that padding does not contribute to gradients. A loss that multiplies the
    outputs by an array of weights has zero gradients in the padding, which would hide such a bug.
    """
    weights = jnp.cos(jnp.arange(outputs.size, dtype=jnp.float32)).reshape(outputs.shape)
    return jnp.sum(outputs * weights + 0.02 * jax.nn.softplus(outputs))


def run_layers(
    cases: Mapping[str, LayerCase], mesh_shape: tuple[int, ...] | None
) -> dict[str, dict[str, Any]]:
    """Runs the forward and backward passes of several layers in one jitted function.

    Args:
      cases: Maps names to layers and their inputs.
      mesh_shape: Shape of the mesh, or None for one device.

    Returns:
      A dict that maps each name to "outputs", "grads" (gradients of the weights and x) and
      "statistics" (non-trainable variables after the call).
    """
    mesh = None if mesh_shape is None else make_mesh(MeshConfig(ici_mesh_shape=mesh_shape))
    models = {name: NnxModel(build) for name, (build, _, _) in cases.items()}

    def place(model: NnxModel, mdl_vars: MdlVars) -> MdlVars:
        if mesh is None:
            return mdl_vars
        specs = [s.partition_spec(mesh.axis_names, p) for p, s in spec_leaves(model.weight_specs())]
        leaves, treedef = jax.tree.flatten(mdl_vars)
        constrained = map(jax.lax.with_sharding_constraint, leaves, specs)
        return jax.tree.unflatten(treedef, constrained)

    @jax.jit
    @without_xla_errors
    def run(all_vars, inputs, key):
        def run_layer(name: str) -> dict[str, Any]:
            model, call = models[name], cases[name][1]
            mdl_vars = place(model, all_vars[name])

            def loss_fn(params, x):
                module = model.module({**mdl_vars, "params": params})
                outputs = call(module, x, key)
                return revealing(outputs), (outputs, mdl_vars_of(module)["non_trainable"])

            grads, (outputs, statistics) = jax.grad(loss_fn, argnums=(0, 1), has_aux=True)(
                mdl_vars["params"], inputs[name]
            )
            return {"outputs": outputs, "grads": grads, "statistics": statistics}

        return {name: run_layer(name) for name in models}

    arguments = (
        {name: drawn(model) for name, model in models.items()},
        {name: x for name, (_, _, x) in cases.items()},
        jax.random.key(5),
    )
    if mesh is None:
        return jax.device_get(run(*arguments))
    with jax.set_mesh(mesh):
        return jax.device_get(run(*arguments))


def assert_near(actual: Any, expected: Any, *, tolerance: float = 2e-6) -> None:
    """Asserts that two trees have the same structure and nearly equal arrays.

    Args:
      actual: Actual values.
      expected: Expected values.
      tolerance: Allowed difference relative to the largest element in a leaf, in addition to 1e-5
        relative to each element.
    """
    paths, treedef = jax.tree.flatten_with_path(actual)
    assert treedef == jax.tree.structure(expected)  # type: ignore[operator]  # Stubs lack __eq__.
    for (path, a), b in zip(paths, jax.tree.leaves(expected), strict=True):
        atol = tolerance * max(1.0, np.abs(b).max(initial=0.0))
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=atol, err_msg=str(path))
