"""Compares our layers with the golden results of Pax in tests/goldens/pax_options/layers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.core import NnxModel
from praxis_lite.core.models.model import MdlVars
from praxis_lite.core.models.nnx_model import mdl_vars_of
from praxis_lite.pax.weights import mdl_vars_from_pax
from praxis_tools.check.asserts.layers import assert_near
from tests.support.goldens import Arrays, pax_options


def mdl_vars_from(model: NnxModel, case: Arrays) -> MdlVars:
    """Returns our variables with Pax's values, and checks that all values are used."""
    pax_vars = {"params": case.get("w", {}), "non_trainable": case.get("stat", {})}
    return jax.tree.map(jnp.asarray, mdl_vars_from_pax(model, pax_vars))


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Returns the leaves of nested dicts by path."""
    if not isinstance(tree, dict):
        return {prefix.removesuffix("/"): tree}
    return {k: v for name, node in tree.items() for k, v in flat(node, f"{prefix}{name}/").items()}


def assert_equals_pax(
    file: str, name: str, build: Callable[..., Any], call: Callable[..., jax.Array]
) -> None:
    """Checks the outputs, the gradients (of weights and x) and the new statistics of a case.

    Args:
      build: Function of `rngs` that returns our layer.
      call: Function of (module, x, paddings) that returns the outputs.
    """
    numbers, model = pax_options(file), NnxModel(build)
    case, inputs = numbers[name], numbers[""]["in"]
    mdl_vars, y = mdl_vars_from(model, case), case["out"]["y"]
    x = next(a for p, a in inputs.items() if p[0] == "x" and a.shape == case["gin"]["x"].shape)
    paddings = next((a for a in inputs.values() if a.shape == x.shape[:2]), None)
    cotangent = np.cos(np.arange(y.size, dtype=np.float32)).reshape(y.shape)

    def objective(params: Any, x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, Any]]:
        module = model.module({**mdl_vars, "params": params})
        outputs = call(module, x, paddings)
        return jnp.sum(outputs * cotangent), (outputs, mdl_vars_of(module)["non_trainable"])

    gradients = jax.grad(objective, argnums=(0, 1), has_aux=True)
    grads, (outputs, statistics) = jax.jit(gradients)(mdl_vars["params"], jnp.asarray(x))
    assert_near(outputs, y)
    if "new" in case or "stat" not in case:
        assert_near(flat(statistics), case.get("new", {}))
    if "grad" in case or "w" not in case:
        assert_near(grads[1], case["gin"]["x"], tolerance=5e-6)
        assert_near(flat(grads[0]), case.get("grad", {}), tolerance=5e-6)
