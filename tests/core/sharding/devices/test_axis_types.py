"""Axis types: every mesh states them, in one place; Explicit ones are types of arrays in a step."""

import ast
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from praxis_lite.core import ConfigError, MeshConfig, constrain, make_mesh
from praxis_lite.core.sharding.devices.axis_types import (
    UnevenType,
    is_type_error,
    mesh_of,
    type_spec,
    untyped,
    with_auto_axes,
)

ROOT = Path(__file__).parents[4]
# JAX's constructors of meshes, which differ in the type that they take by default.
CONSTRUCTORS = {"Mesh", "AbstractMesh", "make_mesh", "create_hybrid_device_mesh"}
# Where meshes are made; the loader is a program of its own, which cannot import the library.
PLACES = {"praxis_lite/core/sharding/devices/axis_types.py", "praxis_tools/export/load.py"}


def calls_of_jax(file):
    """Yields the calls of JAX's constructors of meshes in a file."""
    source = file.read_text(encoding="utf-8")
    if not any(name in source for name in CONSTRUCTORS):
        return  # To parse every file would take seconds.
    tree = ast.parse(source)
    imported = {
        name.asname or name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "jax"
        for name in node.names
        if name.name in CONSTRUCTORS
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in CONSTRUCTORS:
            if ast.unparse(function).startswith("jax."):
                yield node
        elif isinstance(function, ast.Name) and function.id in imported:
            yield node


def files_of(*folders):
    return [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]


def test_every_mesh_of_the_library_is_made_in_one_place():
    places = {
        file.relative_to(ROOT).as_posix()
        for file in files_of("praxis_lite", "praxis_tools", "tasks", "experiments", "examples")
        if any(calls_of_jax(file))
    }
    assert places == PLACES


def test_every_mesh_states_the_types_of_its_axes():
    silent = [
        f"{file.relative_to(ROOT)}:{call.lineno}"
        for file in [*map(ROOT.joinpath, sorted(PLACES)), *files_of("tests", "benchmarks")]
        for call in calls_of_jax(file)
        if "axis_types" not in {keyword.arg for keyword in call.keywords}
    ]
    assert silent == []


def mesh_typed(axis_types, shape=(2, 2, 2)):
    return make_mesh(MeshConfig(ici_mesh_shape=shape, axis_types=axis_types))


def test_a_word_types_all_axes_and_a_sequence_each():
    auto, explicit = AxisType.Auto, AxisType.Explicit
    assert mesh_typed("auto").axis_types == (auto,) * 3
    assert mesh_typed("explicit").axis_types == (explicit,) * 3
    assert mesh_typed(("auto", "explicit", "auto")).axis_types == (auto, explicit, auto)
    arrays_lie_on = with_auto_axes(mesh_typed("explicit"))
    assert arrays_lie_on == mesh_typed("auto")


@pytest.mark.parametrize(
    ("axis_types", "message"),
    [
        ("explict", "mesh.axis_types is 'explict'.*auto, explicit.*Did you mean explicit"),
        (("auto", "explicit"), r"mesh.axis_types is \('auto', 'explicit'\).*'replica', 'data'"),
        (("auto", "auto", "manual"), "mesh.axis_types is 'manual'"),
        (3, "mesh.axis_types is 3"),
    ],
)
def test_other_words_are_refused(axis_types, message):
    with pytest.raises(ConfigError, match=message):
        MeshConfig(ici_mesh_shape=(2, 2, 2), axis_types=axis_types)


def typed(function, x, axis_types="explicit"):
    """Returns the spec of the type that `function(x)` has on a mesh, and its value."""
    mesh, specs = mesh_typed(axis_types), []

    def traced(x):
        result = function(x)
        specs.append(type_spec(result))
        return result

    with jax.set_mesh(mesh):
        return specs, np.asarray(jax.jit(traced)(x))


def test_a_constraint_is_the_arrays_type():
    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    specs, actual = typed(lambda x: constrain(x, (("replica", "data"), "mdl")) * 2, x)
    assert specs == [PartitionSpec(("replica", "data"), "mdl")]
    np.testing.assert_array_equal(actual, x * 2)
    specs, actual = typed(
        lambda x: constrain(x, ("data", "mdl")) * 2, x, ("auto", "explicit", "auto")
    )
    assert specs == [PartitionSpec("data", None)]
    np.testing.assert_array_equal(actual, x * 2)


def test_an_uneven_type_is_refused_with_what_to_change():
    with pytest.raises(UnevenType, match=r"\(7,\) is split over 'mdl'.*dim 0 .* 2\..*axis_types"):
        typed(lambda x: constrain(x, ("mdl",)), np.ones(7))


def test_what_is_computed_untyped_is_typed_again():
    def scanned(x):  # JAX has no type of a scan over a dim that is split.
        return jax.lax.scan(lambda c, row: (c + row.sum(), row * 2), jnp.zeros(()), x)[1]

    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    with pytest.raises(Exception, match="should be replicated") as refused:
        typed(lambda x: scanned(constrain(x, ("data", None))), x)
    assert is_type_error(refused.value)
    rows = PartitionSpec("data", None)
    specs, actual = typed(lambda x: untyped(scanned, constrain(x, ("data", None)), out=rows), x)
    assert specs == [rows]
    np.testing.assert_array_equal(actual, x * 2)


def test_other_errors_are_not_of_types():
    assert not is_type_error(ValueError("weights must be positive"))
    assert not is_type_error(ConfigError("a sharding is wrong"))


def test_a_mesh_without_types_said_has_auto_axes():
    devices = np.asarray(jax.devices()[:4]).reshape(2, 2)
    assert mesh_of(devices, ("data", "mdl")).axis_types == (AxisType.Auto,) * 2
