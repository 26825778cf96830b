"""Products that XLA may permute: each that is wrong is patched, and said, and nothing else is."""

import random
import types

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import export
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from praxis_lite.core import Learner, MeshConfig, Partitioner, Task, constrain, make_mesh
from praxis_lite.core.xla_workarounds import patched_matmuls
from praxis_lite.core.xla_workarounds.patched_matmuls import (
    PatchedFunction,
    patch_exported_matmuls,
    patch_matmuls,
)
from praxis_lite.host.host_memory import FirstRuns
from praxis_lite.layers import SHARDING_PRESETS
from praxis_lite.models import FunctionModel
from praxis_lite.trainer.compilation import compile_step
from praxis_tools.check import check_on_meshes
from praxis_tools.explain import hlo
from praxis_tools.explain.explain import explain
from tests.layers.whole_model import preset_runs
from tests.support.lm_runs import structs
from tests.support.marks import slow_but
from tests.tools.check import tiny

AXES = ("replica", "data", "mdl")
LAYERS = ("bmk,kn->bmn", "bmk,kn->bmn", "bmk,knh->bmnh", "bmkj,kjn->bmn")
# Equation; splits of x, w, the results and the gradient of w; and what XLA gets wrong.
WRONG = {
    "two orders": (
        "mk,kn->mn",
        P(("replica", "data"), "mdl"),
        P("mdl"),
        P(("data", "replica"), "mdl"),
        P("mdl"),
        "y",
    ),
    "rows beside the sum": (
        "bmk,knh->bmnh",
        P(("replica", "mdl"), None, "data"),
        P("data", None, "mdl"),
        P(("replica", "mdl"), None, "data"),
        P("data", None, "mdl"),
        "y",
    ),
    "slots": (
        "bmk,kn->bmn",
        P("data", None, "mdl"),
        P("data"),
        P("data", None, ("replica", "mdl")),
        P("data", ("replica", "mdl")),
        "w",
    ),
    "a weight over all axes": (
        "bmk,kn->bmn",
        P("mdl", "replica", "data"),
        P(("replica", "data"), "mdl"),
        P("mdl", None, "data"),
        P(("replica", "data"), "mdl"),
        "w",
    ),
}


def mesh_of(sizes=(2, 2, 2)):
    return jax.make_mesh(sizes, AXES[: len(sizes)], axis_types=(AxisType.Auto,) * len(sizes))


def run(function, arrays, mesh, mend):
    """Returns the results of a program, the bytes that its collectives send, and what is said."""
    said = []
    with jax.set_mesh(mesh):
        jitted = jax.jit(lambda *arrays: function(*arrays))  # JAX keeps those of one function.
        lowered = jitted.lower(*arrays)
        if mend:
            lowered = patch_matmuls(lowered, mesh, said.append)
        compiled = lowered.compile()
        results = jax.device_get(jitted(*arrays))
        assert jitted._cache_size() == 1
    return results, sum(item.bytes * item.count for item in hlo.collectives(compiled)), said


def outcome(case, mesh, *, mend, in_scan=False):
    """Returns those of "y", "x" and "w" whose numbers are wrong; bytes and sentences as of `run`.

    They are of a product and of its gradients, of small integers: NumPy's are the very same.
    """
    equation, of_x, of_w, of_y, of_slots, *_ = case
    (x_dims, w_dims), y_dims = equation.split("->")[0].split(","), equation.split("->")[1]
    rng = np.random.default_rng(0)
    x, w, dy = (
        rng.integers(-4, 5, (8,) * len(dims)).astype(np.float32)
        for dims in (x_dims, w_dims, y_dims)
    )
    split = jax.lax.with_sharding_constraint

    def step(x, w, dy):
        def loss(x, w):
            y = split(jnp.einsum(equation, split(x, of_x), w), of_y)
            return (y * dy).sum(), y

        (_, y), (dx, dw) = jax.value_and_grad(loss, (0, 1), has_aux=True)(x, split(w, of_w))
        return y, dx, split(dw, of_slots)

    def scanned(x, w, dy):
        once = jax.tree.map(lambda a: a[None], (x, w, dy))
        _, results = jax.lax.scan(lambda carry, arrays: (carry, step(*arrays)), 0, once)
        return jax.tree.map(lambda a: a[0], results)

    actual, sent, said = run(scanned if in_scan else step, (x, w, dy), mesh, mend)
    expected = (
        np.einsum(equation, x, w),
        np.einsum(f"{y_dims},{w_dims}->{x_dims}", dy, w),
        np.einsum(f"{y_dims},{x_dims}->{w_dims}", dy, x),
    )
    pairs = zip("yxw", actual, expected, strict=True)
    wrong = "".join(name for name, a, b in pairs if not np.array_equal(a, b))
    return wrong, sent, said


@pytest.mark.parametrize("in_scan", slow_but({True}, [False, True]))
@pytest.mark.parametrize("name", WRONG)
def test_a_product_that_xla_permutes_is_patched_for_the_bytes_that_are_said(name, in_scan):
    wrong, bare, _ = outcome(WRONG[name], mesh_of(), mend=False, in_scan=in_scan)
    assert wrong == WRONG[name][-1], "XLA is patched: docs/upstream/matmul_rows.md"
    wrong, sent, (text,) = outcome(WRONG[name], mesh_of(), mend=True, in_scan=in_scan)
    assert wrong == "" and WRONG[name][0] in text
    # A device's part of the results: 4 x 2, 2 x 8 x 4 x 8, and 4 x 2 of a weight, of float32.
    more = 2048 if name == "rows beside the sum" else 32
    shown = "2.0 KiB" if more == 2048 else "32 B"
    assert sent - bare == more and f"moved: {shown} more from each device" in text


def test_orders_are_said_and_a_program_that_is_patched_has_none_left():
    x = w = np.ones((8, 8), np.float32)
    said, mesh = [], mesh_of()
    with jax.set_mesh(mesh):
        lowered = patch_matmuls(jax.jit(permuted).lower(x, w), mesh, said.append)
    (text,) = said
    assert "it sums over 'mdl'" in text
    assert "'replica', 'data' in an operand and 'data', 'replica' in the results" in text
    assert patch_matmuls(lowered, mesh, pytest.fail) is lowered


def test_what_has_no_such_order_is_first_whole():
    """`w` has "data" before "mdl"; the results have them in two dims the other way round."""
    case = (
        "bmk,knh->bmnh",
        P("mdl", "data", "replica"),
        P(None, "data", "replica"),
        P("mdl", "data"),
        P("mdl", "data", "replica"),
    )
    wrong, _, (text,) = outcome(case, mesh_of(), mend=True)
    assert wrong == "" and "first replicated over 'data': 2 times 256 B on each device" in text


def permuted(x, w):
    """Returns x @ w of split arrays, wrong if XLA compiles it as it is."""
    split, (_, of_x, of_w, of_y, *_) = jax.lax.with_sharding_constraint, WRONG["two orders"]
    return split(_product(split(x, of_x), split(w, of_w)), of_y)


@jax.jit
def _product(x, w):
    return x @ w


def rematerialized(x, w):
    return jax.value_and_grad(lambda x: jax.checkpoint(permuted)(x, w).sum())(x)[1], permuted(x, w)


def of_two_calls(x, w):
    """A function's product, which two of its calls split in two ways."""
    split = jax.lax.with_sharding_constraint
    other = _product(split(x, P(("replica", "mdl"), "data")), split(w, P("data")))
    return split(other, P(("mdl", "replica"), "data")), permuted(x, w)


def in_a_branch(x, w):
    return jax.lax.cond(x.sum() < 1e9, lambda: permuted(x, w), lambda: x), permuted(x, w)


@pytest.mark.parametrize("function", [rematerialized, of_two_calls, in_a_branch])
def test_products_in_functions_and_branches_are_patched(function):
    rng = np.random.default_rng(0)
    x, w = (rng.integers(-4, 5, (8, 8)).astype(np.float32) for _ in range(2))
    first = np.broadcast_to(w.sum(1), (8, 8)) if function is rematerialized else x @ w
    bare, *_ = run(function, (x, w), mesh_of(), mend=False)
    assert not np.array_equal(bare[1], x @ w)
    actual, _, said = run(function, (x, w), mesh_of(), mend=True)
    np.testing.assert_array_equal(actual[0], first)
    np.testing.assert_array_equal(actual[1], x @ w)
    assert ("is called with different shardings" in said[0]) == (function is of_two_calls)


def test_over_explicit_axes_products_are_patched():
    mesh = jax.make_mesh((2, 2, 2), AXES, axis_types=(AxisType.Explicit,) * 3)
    equation, of_x, of_w, of_y, *_ = WRONG["rows beside the sum"]
    rng = np.random.default_rng(0)
    x, w = (rng.integers(-4, 5, (8, 8, 8)).astype(np.float32) for _ in range(2))
    arrays = [
        jax.device_put(a, jax.NamedSharding(mesh, spec)) for a, spec in ((x, of_x), (w, of_w))
    ]

    def product(x, w):
        return jnp.einsum(equation, x, w, out_sharding=P(*of_y, None))

    expected = np.einsum(equation, x, w)
    assert not np.array_equal(run(product, arrays, mesh, mend=False)[0], expected)
    actual, _, said = run(product, arrays, mesh, mend=True)
    np.testing.assert_array_equal(actual, expected)
    assert len(said) == 1


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
        patch_matmuls(jax.jit(mapped).lower(x, w), mesh, pytest.fail)


def test_in_a_function_that_a_shard_map_calls_its_axes_do_not_count():
    """Nothing is compiled, so a mesh of sixteen devices need not be there."""
    mesh = AbstractMesh((2,) * 4, ("pipe", *AXES), axis_types=(AxisType.Auto,) * 4)
    rows, said = jax.NamedSharding(mesh, P("pipe")), []
    arrays = [jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=rows)] * 2
    with jax.sharding.use_abstract_mesh(mesh):
        mapped = jax.shard_map(
            permuted, in_specs=(P("pipe"), P("pipe")), out_specs=P("pipe"), axis_names={"pipe"}
        )
        lowered = jax.jit(mapped).trace(*arrays).lower(lowering_platforms=("cpu",))
    patch_matmuls(patch_matmuls(lowered, mesh, said.append), mesh, pytest.fail)
    (text,) = said
    assert "'replica', 'data' in an operand" in text


def test_what_cannot_be_patched_is_said(monkeypatch):
    monkeypatch.setattr(patched_matmuls, "_MAX_ROUNDS", 0)
    _, _, (text,) = outcome(WRONG["two orders"], mesh_of(), mend=True)
    assert "could not be patched" in text and "praxis check" in text


def test_exports_are_patched_unless_they_are_for_any_number_of_rows():
    mesh, said = mesh_of(), []
    whole = jax.NamedSharding(mesh, P())
    jitted = jax.jit(lambda x, w: permuted(x, w), in_shardings=whole, out_shardings=whole)
    rng = np.random.default_rng(0)
    x, w = (rng.integers(-4, 5, (8, 8)).astype(np.float32) for _ in range(2))
    with jax.set_mesh(mesh):
        exported = export.export(jitted)(x, w)
        (rows,) = export.symbolic_shape("8*b")
        any_rows = export.export(jitted)(jax.ShapeDtypeStruct((rows, 8), jnp.float32), w)

    def computed(program):
        program = export.deserialize(program.serialize())
        return jax.jit(program.call, in_shardings=(whole, whole))(x, w)

    assert not np.array_equal(computed(exported), x @ w)
    np.testing.assert_array_equal(
        computed(patch_exported_matmuls(exported, mesh, said.append)), x @ w
    )
    assert patch_exported_matmuls(any_rows, mesh, said.append) is any_rows
    assert "32 B more from each device" in said[0] and "not searched" in said[1]


def test_programs_that_no_job_compiles_are_patched_before_their_first_run(caplog):
    """FirstRuns runs those of decoders and predictions, PatchedFunction those of --mode=check."""
    rng, mesh = np.random.default_rng(0), mesh_of()
    place = jax.NamedSharding(mesh, P())
    x, w = (jax.device_put(rng.integers(-4, 5, (8, 8)).astype(np.float32), place) for _ in range(2))
    with jax.set_mesh(mesh):
        functions = [jax.jit(lambda x, w, n=n: permuted(x, w) + n) for n in range(3)]
        bare = functions[0](x, w)
        first = FirstRuns("It", "").run(functions[1], x, w)
        called = PatchedFunction(functions[2], mesh)(x, w)
    expected = np.asarray(x) @ np.asarray(w)
    assert not np.array_equal(bare, expected)
    np.testing.assert_array_equal(first, expected + 1)
    np.testing.assert_array_equal(called, expected + 2)
    assert "are now computed in the operand's order and moved" in caplog.text


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


@pytest.mark.nightly
def test_of_random_layers_none_is_wrong_any_more():
    rng, mesh, num_wrong = random.Random(0), mesh_of(), 0
    for case in [random_layer(rng) for _ in range(80)]:
        wrong, _, said = outcome(case, mesh, mend=True)
        assert wrong == "", (case, said)
        num_wrong += bool(said and outcome(case, mesh, mend=False)[0])
    assert num_wrong


@pytest.mark.parametrize(
    "preset",
    [
        "fsdp+tensor",
        *(
            pytest.param(preset, marks=pytest.mark.nightly)
            for preset in SHARDING_PRESETS
            if preset != "fsdp+tensor"
        ),
    ],
)
def test_no_preset_has_such_a_product(preset):
    mesh = preset_runs.mesh_of(preset, (2, 2, 2))
    partitioner = preset_runs.partitioner_of(preset_runs.even_lm(), preset, mesh)
    lowered = partitioner.train_step.lower(structs(preset_runs.batch_of(16, 12, 64)))
    patch_matmuls(lowered, mesh, pytest.fail)


class Product(Task):
    """A product that XLA permutes, as splits of a user's own say."""

    required_inputs = ("x",)

    def compute_loss(self, model, inputs, key):
        y = constrain(inputs["x"] @ model.w[...], (("data", "replica"), "mdl"))
        weights = jnp.arange(1.0, 1 + y.size).reshape(y.shape)
        return {"loss": (jnp.mean((y - weights) ** 2), jnp.ones(()))}


class Weight(nnx.Module):
    def __init__(self, rngs):
        w = jax.random.randint(rngs.params(), (8, 8), -4, 5).astype(jnp.float32)
        self.w = nnx.Param(w, split_dims_mapping=("mdl", None))


class Rows:
    def element_spec(self):
        return {"x": jax.ShapeDtypeStruct((16, 8), jnp.float32)}

    def element_specs(self):
        return (self.element_spec(),)


def partitioner_of(mesh_shape):
    task = Product(
        Weight,
        Learner(optax.sgd, 0.1),
        inputs_split_mapping={"map_2d": (("replica", "data"), "mdl")},
    )
    return Partitioner(
        task, make_mesh(MeshConfig(ici_mesh_shape=mesh_shape, allow_unused_devices=True))
    )


def losses(partitioner):
    """Returns the losses of three steps."""
    state, key = partitioner.init(partitioner.key(0)), partitioner.key(1)
    batch = {"x": np.random.default_rng(0).integers(-4, 5, (16, 8)).astype(np.float32)}
    result = []
    for _ in range(3):
        state, outputs = partitioner.train_step(state, partitioner.global_batch(batch), key)
        result.append(float(outputs["metrics"]["loss"][0]))
    return result


def test_a_jobs_losses_are_those_of_one_device(caplog):
    expected = losses(partitioner_of((1, 1, 1)))
    bare = losses(partitioner_of((2, 2, 2)))
    assert abs(bare[0] / expected[0] - 1) > 1e-3
    partitioner = partitioner_of((2, 2, 2))
    compiled = compile_step(partitioner.train_step, Rows(), "datasets.train")
    assert "are now computed in the operand's order and moved" in caplog.text
    np.testing.assert_allclose(losses(partitioner), expected, rtol=1e-5)
    assert partitioner.train_step.num_compiled() == 1
    state_bytes = sum(leaf.bytes_per_device for leaf in partitioner.layout.leaves())
    assert hlo.donated_bytes(compiled) == state_bytes


class PermutedPoints(tiny.PointsTask):
    """Its rows split in two orders."""

    def logits(self, model, inputs, key):
        hidden = jnp.tanh(inputs["inputs"] @ model["first"]["w"])
        return constrain(hidden, (("data", "replica"), "mdl")) @ model["last"]["w"]


class Permuted(tiny.Points):
    def mesh(self):
        return fdl.Config(MeshConfig, ici_mesh_shape=(2, 2, 2))

    def task(self):
        specs = {"first": {"w": ("mdl", None), "b": None}, "last": {"w": None}}
        rows = ("replica", "data")
        return fdl.Config(
            PermutedPoints,
            fdl.Config(FunctionModel, tiny.init_points, specs=specs),
            tiny.learner(),
            inputs_split_mapping={"map_1d": (rows,), "map_2d": (rows, "mdl")},
        )


@pytest.mark.slow
def test_a_check_runs_what_a_job_runs(caplog):
    actual = check_on_meshes(
        Permuted, [(2, 2, 2)], steps=2, parts=("training", "evaluation", "as trained")
    )
    assert actual.certified, actual.summary()
    assert "are now computed in the operand's order and moved" in caplog.text


def test_explain_says_so_and_of_gspmd_that_nothing_was_looked_for(monkeypatch):
    partitioner = partitioner_of((2, 2, 2))
    explained = explain(partitioner, {"train": Rows()}, {}, lambda text: None, experiment="mine")
    assert any("XLA may permute" in warning for warning in explained.warnings)
    assert "WARNING: XLA may permute" in explained.text
    lowered = partitioner.train_step.lower(Rows().element_spec())
    monkeypatch.setattr(
        patched_matmuls,
        "jax",
        types.SimpleNamespace(config=types.SimpleNamespace(jax_use_shardy_partitioner=False)),
    )
    said = []
    patch_matmuls(lowered, partitioner.mesh, said.append)
    assert "3-axis meshes: jax_use_shardy_partitioner is False" in said[0]


def test_two_axes_permute_nothing():
    mesh = mesh_of((2, 4))
    with jax.set_mesh(mesh):
        patch_matmuls(
            jax.jit(jnp.matmul).lower(jnp.ones((8, 8)), jnp.ones((8, 8))), mesh, pytest.fail
        )
