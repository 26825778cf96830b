"""Products that XLA may permute: each that is wrong is among those that are named."""

import random
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from praxis_lite.core import Learner, MeshConfig, Partitioner, Task, constrain, make_mesh
from praxis_lite.layers import SHARDING_PRESETS
from praxis_lite.run.trainer.checks import product_orders
from praxis_lite.run.trainer.checks.memory import compile_step
from praxis_lite.run.trainer.checks.product_orders import product_warnings
from praxis_lite.tools.explain.explain import explain
from tests.layers.whole_model import preset_runs
from tests.support.lm_runs import structs

AXES = ("replica", "data", "mdl")
LAYERS = ("bmk,kn->bmn", "bmk,kn->bmn", "bmk,knh->bmnh", "bmkj,kjn->bmn")
# Equation; splits of x, w, the results and the gradient of w; and what XLA gets wrong.
WRONG = {
    "two orders": (
        "mk,kn->mn", P(("replica", "data"), "mdl"), P("mdl"), P(("data", "replica"), "mdl"),
        P("mdl"), "y",
    ),
    "rows beside the sum": (
        "bmk,knh->bmnh", P(("replica", "mdl"), None, "data"), P("data", None, "mdl"),
        P(("replica", "mdl"), None, "data"), P("data", None, "mdl"), "y",
    ),
    "slots": (
        "bmk,kn->bmn", P("data", None, "mdl"), P("data"), P("data", None, ("replica", "mdl")),
        P("data", ("replica", "mdl")), "w",
    ),
    "a weight over all axes": (
        "bmk,kn->bmn", P("mdl", "replica", "data"), P(("replica", "data"), "mdl"),
        P("mdl", None, "data"), P(("replica", "data"), "mdl"), "w",
    ),
}


def mesh_of(sizes=(2, 2, 2)):
    return jax.make_mesh(sizes, AXES[: len(sizes)], axis_types=(AxisType.Auto,) * len(sizes))


def outcome(case, mesh, in_scan=False):
    """Returns those of "y", "x" and "w" whose numbers are wrong, and the warnings.

    They are of a product and of its gradients, of small integers: NumPy's are the very same.
    """
    equation, of_x, of_w, of_y, of_slots, *_ = case
    (x_dims, w_dims), y_dims = equation.split("->")[0].split(","), equation.split("->")[1]
    rng = np.random.default_rng(0)
    x, w, dy = (
        rng.integers(-4, 5, (8,) * len(dims)).astype(np.float32)
        for dims in (x_dims, w_dims, y_dims)
    )
    constrain = jax.lax.with_sharding_constraint

    def step(x, w, dy):
        def loss(x, w):
            y = constrain(jnp.einsum(equation, constrain(x, of_x), w), of_y)
            return (y * dy).sum(), y

        (_, y), (dx, dw) = jax.value_and_grad(loss, (0, 1), has_aux=True)(x, constrain(w, of_w))
        return y, dx, constrain(dw, of_slots)

    def scanned(x, w, dy):
        once = jax.tree.map(lambda a: a[None], (x, w, dy))
        _, results = jax.lax.scan(lambda carry, arrays: (carry, step(*arrays)), 0, once)
        return jax.tree.map(lambda a: a[0], results)

    with jax.set_mesh(mesh):
        lowered = jax.jit(scanned if in_scan else step).lower(x, w, dy)
        actual = lowered.compile()(x, w, dy)
    expected = (
        np.einsum(equation, x, w), np.einsum(f"{y_dims},{w_dims}->{x_dims}", dy, w),
        np.einsum(f"{y_dims},{x_dims}->{w_dims}", dy, x),
    )
    pairs = zip("yxw", actual, expected, strict=True)
    wrong = "".join(name for name, a, b in pairs if not np.array_equal(a, b))
    return wrong, product_warnings(lowered, mesh)


@pytest.mark.parametrize("in_scan", [False, True])
@pytest.mark.parametrize("name", WRONG)
def test_a_product_that_xla_permutes_is_named(name, in_scan):
    wrong, warnings = outcome(WRONG[name], mesh_of(), in_scan)
    assert wrong == WRONG[name][-1], "XLA is mended: docs/upstream/matmul_rows.md"
    assert any(WRONG[name][0] in text and "--mode=check" in text for text in warnings)


def test_orders_are_said():
    _, (text, *_) = outcome(WRONG["two orders"], mesh_of())
    assert "it sums over 'mdl'" in text
    assert "'replica', 'data' in an operand and 'data', 'replica' in the results" in text


def test_inside_a_shard_map_its_axes_do_not_count():
    def product(x, w):
        y = jax.lax.with_sharding_constraint(x @ w, P("data", "mdl"))
        return jax.lax.with_sharding_constraint(y, P("mdl", "data"))

    mesh = mesh_of()
    with jax.set_mesh(mesh):
        mapped = jax.shard_map(
            product, in_specs=(P("replica"), P()), out_specs=P("replica"), axis_names={"replica"}
        )
        x, w = jnp.ones((8, 8)), jnp.ones((8, 8))
        assert product_warnings(jax.jit(mapped).lower(x, w), mesh) == []


def random_layer(rng):
    """Returns a case: rows keep their split, time may change its, slots may have more axes."""

    def dealt(names, num_dims, share):
        dims = [[] for _ in range(num_dims)]
        for name in names:
            if rng.random() < share:
                rng.choice(dims).append(name)
        return dims

    def spec(dims):
        return P(*(tuple(rng.sample(names, len(names))) or None for names in dims))

    equation = rng.choice(LAYERS)
    (x_dims, w_dims), y_dims = equation.split("->")[0].split(","), equation.split("->")[1]
    rows = [axis for axis in AXES if rng.random() < 0.5] or ["data"]
    times = [axis for axis in AXES if axis not in rows and rng.random() < 0.4]

    def activation(rank):
        time = times if rng.random() < 0.6 else []
        free = [axis for axis in AXES if axis not in (*rows, *time)]
        return spec([rows, time, *dealt(free, rank - 2, 0.7)])

    weight = dealt(AXES, len(w_dims), 0.8)
    used = [axis for dim in weight for axis in dim]
    slots = [list(dim) for dim in weight]
    rng.choice(slots).extend(axis for axis in AXES if axis not in used and rng.random() < 0.5)
    return equation, activation(len(x_dims)), spec(weight), activation(len(y_dims)), spec(slots)


@pytest.mark.slow
def test_of_random_layers_all_that_are_wrong_are_named():
    rng, mesh, num_wrong = random.Random(0), mesh_of(), 0
    for case in [random_layer(rng) for _ in range(80)]:
        wrong, warnings = outcome(case, mesh)
        assert warnings or not wrong, case
        num_wrong += bool(wrong)
    assert num_wrong


@pytest.mark.parametrize(
    "preset",
    [
        "fsdp+tensor", "sequence",
        *(
            pytest.param(preset, marks=pytest.mark.slow) for preset in SHARDING_PRESETS
            if preset not in ("fsdp+tensor", "sequence")
        ),
    ],
)
def test_no_preset_has_such_a_product(preset):
    mesh = preset_runs.mesh_of(preset, (2, 2, 2))
    partitioner = preset_runs.partitioner_of(preset_runs.even_lm(), preset, mesh)
    lowered = partitioner.train_step.lower(structs(preset_runs.batch_of(16, 12, 64)))
    assert product_warnings(lowered, mesh) == []


class Product(Task):
    """A product that XLA permutes, as splits of a user's own say."""

    required_inputs = ("x",)

    def compute_loss(self, model, inputs, key):
        y = constrain(inputs["x"] @ model.w[...], (("data", "replica"), "mdl"))
        return {"loss": (jnp.mean(y**2), jnp.ones(()))}


class Weight(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(jnp.ones((8, 8)), split_dims_mapping=("mdl", None))


class Rows:
    def element_spec(self):
        return {"x": jax.ShapeDtypeStruct((16, 8), jnp.float32)}


def test_a_job_and_explain_say_so_and_of_gspmd_that_nothing_was_looked_for(caplog, monkeypatch):
    task = Product(
        Weight, Learner(optax.sgd, 0.1),
        inputs_split_mapping={"map_2d": (("replica", "data"), "mdl")},
    )
    partitioner = Partitioner(task, make_mesh(MeshConfig(ici_mesh_shape=(2, 2, 2))))
    compile_step(partitioner.train_step, Rows(), "datasets.train")
    assert "XLA may permute the results" in caplog.text
    explained = explain(partitioner, {"train": Rows()}, {}, lambda text: None, experiment="mine")
    assert any("XLA may permute" in warning for warning in explained.warnings)
    assert "WARNING: XLA may permute" in explained.text
    lowered = partitioner.train_step.lower(Rows().element_spec())
    monkeypatch.setattr(
        product_orders, "jax", types.SimpleNamespace(
            config=types.SimpleNamespace(jax_use_shardy_partitioner=False)
        )
    )
    (text,) = product_warnings(lowered, partitioner.mesh)
    assert "were not looked for: jax_use_shardy_partitioner is False" in text


def test_two_axes_permute_nothing():
    mesh = mesh_of((2, 4))
    with jax.set_mesh(mesh):
        lowered = jax.jit(jnp.matmul).lower(jnp.ones((8, 8)), jnp.ones((8, 8)))
    assert product_warnings(lowered, mesh) == []
