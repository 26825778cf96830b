"""Every layer on a mesh equals itself on one device: outputs, gradients and statistics.

Of uneven sizes over Auto axes, which pad them, and of even sizes over Explicit ones, which are
types. `layer_cases.py` has the layers; those of a group are one program for each kind of mesh.
Of two axes: on three, XLA permutes products in a way that only a job's programs go round
(docs/upstream.md).
"""

import functools
import importlib
import inspect
import pkgutil
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from praxis_lite import layers
from praxis_lite.core import MeshConfig, NnxModel, constrain, make_mesh
from praxis_lite.core.models.model import spec_leaves
from praxis_lite.core.models.nnx_model import mdl_vars_of
from praxis_lite.core.sharding.devices.axis_types import collect_untyped_notes
from praxis_lite.core.xla_workarounds.xla_errors import without_xla_errors
from praxis_lite.layers import AuxLoss, BaseLayer, intermediates
from praxis_tools.check.asserts.layers import assert_near, drawn, revealing
from tests.layers.layer_cases import AXES, GROUPS, NAMES, ROWS, SIZES, Case, Inputs, inputs_of

# Bases, which compute nothing of their own.
BASES = {
    "BaseLayer",
    "Dense",
    "AttentionHeads",
    "Norm",
    "_LastDimNorm",
    "_PaddedNorm",
    "ResidualBranch",
}
# Models with tests of their own (whole_model/test_explicit_axes.py, test_explicit_families.py).
ELSEWHERE = {"Pipeline", "ClassificationModel"}
# Gradients through several norms: a product of inverse deviations makes small differences larger.
TOLERANCES = {
    "norms": 5e-6,
    "attention": 5e-6,
    "attention_options": 5e-6,
    "vision": 5e-6,
    "models": 1e-5,
    "networks": 1e-5,
}


class Program:
    """Outputs, gradients and statistics of a group's layers, not yet compiled.

    Args:
      mesh_shape: None: one device.

    Attributes:
      notes: once it is traced, by case and path why a layer is computed as over Auto axes.
    """

    def __init__(
        self,
        group: str,
        sizes: str,
        mesh_shape: tuple[int, ...] | None = None,
        axis_types: str = "auto",
    ):
        self._cases = GROUPS[group](SIZES[sizes])
        self._models = {name: NnxModel(case.build) for name, case in self._cases.items()}
        self.notes: dict[str, dict[str, str]] = {name: {} for name in self._cases}
        self._arguments = (
            {name: drawn(model) for name, model in self._models.items()},
            inputs_of(SIZES[sizes]),
            jax.random.key(5),
        )
        self._mesh = mesh_shape and make_mesh(
            MeshConfig(ici_mesh_shape=mesh_shape, axis_names=AXES)
        )
        self._is_explicit = axis_types == "explicit"

    def traced(self) -> jax.stages.Traced:
        function = self._placed if self._mesh else self._run
        if self._is_explicit:
            types = (self._specs(), *self._input_specs())
            function = jax.sharding.explicit_axes(self._run, axes=AXES, in_sharding=types)
        return jax.jit(without_xla_errors(function)).trace(*self._arguments)

    def results(self) -> dict[str, Any]:
        if self._mesh is None:
            return jax.device_get(self.traced().lower().compile()(*self._arguments))
        with jax.set_mesh(self._mesh):
            return jax.device_get(self.traced().lower().compile()(*self._arguments))

    def _specs(self) -> dict[str, Any]:
        specs = {}
        for name, model in self._models.items():
            leaves = [s.partition_spec(AXES, path) for path, s in spec_leaves(model.weight_specs())]
            specs[name] = jax.tree.unflatten(jax.tree.structure(self._arguments[0][name]), leaves)
        return specs

    def _input_specs(self) -> tuple[Inputs, PartitionSpec]:
        split = jax.tree.map(
            lambda x: PartitionSpec(ROWS, *(None,) * (x.ndim - 1)), self._arguments[1]
        )
        return split, PartitionSpec()

    def _placed(self, all_vars: Any, inputs: Inputs, key: jax.Array) -> dict[str, Any]:
        """Returns results over Auto axes, weights split as they declare."""
        return self._run(
            jax.tree.map(jax.lax.with_sharding_constraint, all_vars, self._specs()), inputs, key
        )

    def _run(self, all_vars: Any, inputs: Inputs, key: jax.Array) -> dict[str, Any]:
        def one(name: str, case: Case, mdl_vars: Any) -> dict[str, Any]:
            def objective(params: Any, of: jax.Array) -> tuple:
                layer = self._models[name].module({**mdl_vars, "params": params})
                y = case.call(layer, inputs._replace(**{case.of: of}), key)
                aux = sum(intermediates(layer, AuxLoss).values())
                return revealing(y) + aux, (y, aux, mdl_vars_of(layer)["non_trainable"])

            with collect_untyped_notes(self.notes[name]):
                grads, (y, aux, statistics) = jax.grad(objective, argnums=(0, 1), has_aux=True)(
                    mdl_vars["params"], getattr(inputs, case.of)
                )
            return {"outputs": y, "aux": aux, "grads": grads, "statistics": statistics}

        return {name: one(name, case, all_vars[name]) for name, case in self._cases.items()}


@functools.cache
def results(group: str, sizes: str, *mesh: Any) -> dict[str, Any]:
    return Program(group, sizes, *mesh).results()


def each_case(**marks: pytest.MarkDecorator) -> pytest.MarkDecorator:
    """Returns the parameters of a test of every layer, with a mark on those of some groups."""
    return pytest.mark.parametrize(
        ("group", "name"), [pytest.param(*case, marks=marks.get(case[0], ())) for case in NAMES]
    )


@each_case(
    adapters=pytest.mark.slow,
    attention_options=pytest.mark.slow,
    # test_sharded_experts.py has experts in `make test`, and test_partitioner.py a model.
    experts=pytest.mark.nightly,
    models=pytest.mark.nightly,
    networks=pytest.mark.nightly,
)
def test_of_uneven_sizes_it_equals_one_device(group, name):
    actual, expected = (results(group, "uneven", *mesh)[name] for mesh in (((1, 4, 2),), ()))
    assert_near(actual, expected, tolerance=TOLERANCES.get(group, 3e-6))


@pytest.mark.slow
def test_chunked_and_whole_adapted_softmaxes_have_the_same_gradients():
    both = results("adapters", "uneven")
    assert_near(both["adapted softmax in chunks"], both["adapted softmax"])


@functools.cache
def over_explicit_axes(group: str) -> tuple[dict[str, Any], dict[str, dict[str, str]]]:
    """Returns the results of a group over Explicit axes, and the notes of its cases."""
    program = Program(group, "even", (1, 4, 2), "explicit")
    return program.results(), program.notes


# whole_model/test_explicit_families.py has models in CI.
@pytest.mark.slow
@each_case(
    norms=pytest.mark.nightly,
    vision=pytest.mark.nightly,
    models=pytest.mark.nightly,
    networks=pytest.mark.nightly,
)
def test_over_explicit_axes_it_is_typed_and_equals_one_device(group, name):
    actual, notes = over_explicit_axes(group)
    assert notes[name] == {}
    expected = results(group, "even")[name]
    assert_near(actual[name], expected, tolerance=TOLERANCES.get(group, 3e-6))


def test_no_layer_is_left_out():
    packages = pkgutil.walk_packages(layers.__path__, f"{layers.__name__}.")
    modules = [importlib.import_module(package.name) for package in packages]
    classes = {
        x
        for module in modules
        for x in vars(module).values()
        if inspect.isclass(x) and issubclass(x, BaseLayer)
    }
    there = {
        type(node)
        for cases in GROUPS.values()
        for case in cases(SIZES["even"]).values()
        for _, node in nnx.iter_graph(
            nnx.eval_shape(lambda build=case.build: build(rngs=nnx.Rngs(0)))
        )
        if isinstance(node, BaseLayer)
    }
    assert {x.__name__ for x in classes - there} == BASES | ELSEWHERE


def shard_shape_of(mesh, mapping) -> tuple[int, ...]:
    """Returns the shape that a device holds of a [8, 8] output constrained by `mapping`."""
    x = jax.device_put(
        np.ones((8, 8), np.float32), jax.sharding.NamedSharding(mesh, PartitionSpec("data", None))
    )
    with jax.set_mesh(mesh):
        compiled = jax.jit(lambda x: constrain(x * 2.0, mapping)).lower(x).compile()
    return compiled.output_shardings.shard_shape((8, 8))


def test_a_mapping_of_all_none_forces_replication_and_none_leaves_free(mesh_of):
    mesh = mesh_of(1, 4, 2)
    assert shard_shape_of(mesh, (None, None)) == (8, 8)
    assert shard_shape_of(mesh, None) == (2, 8)  # As the input came.
    assert shard_shape_of(mesh, (None, "mdl")) == (8, 4)
    assert shard_shape_of(mesh, ("data",)) == (2, 8)  # Extended to the rank.


def test_without_a_mesh_constrain_returns_its_argument():
    x = jax.numpy.ones((2, 3))
    assert constrain(x, ("no such axis", None)) is x


def test_weights_and_activations_are_really_split(mesh_of):
    """The tests above would pass with no split at all; a device's program shows its share."""
    model = NnxModel(
        functools.partial(
            layers.FeedForward,
            13,
            17,
            weight_split_dims_mapping=("data", "mdl"),
            activation_split_dims_mapping=(ROWS, "mdl"),
        )
    )
    params = {"linear": {"w": np.ones((13, 17), np.float32)}, "bias": {"b": np.ones(17, "f")}}

    def run(params, x):
        return model.module({"params": params, "non_trainable": {}})(x)

    with jax.set_mesh(mesh_of(1, 4, 2)):
        compiled = jax.jit(run).lower(params, np.ones((7, 13), np.float32)).compile()
    assert "f32[2,9]" in compiled.as_text()  # ceil(7 / 4) rows, ceil(17 / 2) columns.
