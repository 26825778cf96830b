"""Padded shapes are Pax's; padding is zeros at the end, and an even leaf costs no operation."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from praxis_lite.core import pad_tree, padded_shape, unpad_tree
from tests.support.goldens import golden

P = PartitionSpec
AXES = ("replica", "data", "mdl")


def spec_of(entries):
    return P(*(tuple(e) if isinstance(e, list) else e for e in entries))


def test_every_uneven_padding_of_pax():
    for case in golden("pax/partitioning.json")["uneven_paddings"]:
        axis_sizes = dict(zip(AXES, case["mesh_shape"], strict=True))
        shape, spec = tuple(case["shape"]), spec_of(case["spec"])
        padded = padded_shape(shape, spec, axis_sizes)
        paddings = [p - dim for p, dim in zip(padded, shape, strict=True)]
        # Pax lists the dims that the spec has; those beyond it are not split.
        assert paddings[: len(spec)] == case["paddings"], case
        assert not any(paddings[len(spec) :]), case


def test_every_padded_shape_of_the_reference():
    cases = golden("reference/uneven_padding.json")["spec_cases"]["padded_shapes"]
    for shape, entries, axis_sizes, expected in cases:
        assert list(padded_shape(shape, spec_of(entries), axis_sizes)) == expected, (shape, entries)


def test_padding_is_zeros_at_the_end_of_each_dim_and_unpad_takes_them_off():
    sizes = {"data": 4, "mdl": 2}
    specs = {"w": P("data", "mdl"), "b": P("mdl"), "count": P()}
    tree = {
        "w": jnp.arange(1.0, 22.0).reshape(7, 3),
        "b": jnp.arange(1, 6, dtype=jnp.int8),
        "count": jnp.array(3),
    }
    padded = pad_tree(tree, specs, sizes)
    np.testing.assert_array_equal(padded["w"], np.pad(tree["w"], [(0, 1), (0, 1)]))
    np.testing.assert_array_equal(padded["b"], [1, 2, 3, 4, 5, 0])
    assert padded["b"].dtype == jnp.int8
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    jax.tree.map(np.testing.assert_array_equal, unpad_tree(padded, shapes, specs), tree)


def test_an_even_leaf_passes_without_any_operation():
    sizes, specs = {"data": 4, "mdl": 2}, {"w": P("data", "mdl"), "v": P(None, "mdl")}
    tree = {"w": jnp.ones((8, 6)), "v": jnp.ones((7, 2))}
    assert not jax.make_jaxpr(lambda t: pad_tree(t, specs, sizes))(tree).eqns
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    assert not jax.make_jaxpr(lambda t: unpad_tree(t, shapes, specs))(tree).eqns


def test_a_leaf_is_annotated_before_it_is_padded_and_after_it_is_sliced(mesh_of):
    mesh, specs = mesh_of(1, 4, 2), {"w": P("data", None)}
    tree = {"w": jnp.ones((7, 3))}
    shapes = {"w": jax.ShapeDtypeStruct((7, 3), jnp.float32)}
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        pad = jax.make_jaxpr(lambda t: pad_tree(t, specs, dict(mesh.shape)))(tree)
        unpad = jax.make_jaxpr(lambda t: unpad_tree(t, shapes, specs))({"w": jnp.ones((8, 3))})
    constraints = [eqn for eqn in pad.eqns if eqn.primitive.name == "sharding_constraint"]
    assert [c.outvars[0].aval.shape for c in constraints] == [(7, 3)]
    assert [eqn.primitive.name for eqn in unpad.eqns][-1] == "sharding_constraint"
    assert unpad.eqns[-1].outvars[0].aval.shape == (7, 3)
