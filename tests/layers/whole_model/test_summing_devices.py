"""Which devices sum a rounded product together, by a hand's count and in compiled programs."""

import json
import sys

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import Mesh

from praxis_lite.core.sharding.devices.axis_types import mesh_of
from praxis_lite.layers.base.dense import is_dense
from praxis_lite.layers.whole_model.rounded_products import summing_devices
from praxis_tools.explain import hlo
from tests.layers.whole_model import preset_runs
from tests.support.lm_runs import structs
from tests.support.marks import nightly_but
from tests.support.on_tpu import needs_libtpu, printed_by

pytest.importorskip("qwix", reason="Qwix is not installed: pip install qwix")

SHAPE = (1, 2, 4)  # replica, data, mdl
# By preset: of the batch, of time, and of the dims of weights by their names; of those that split.
BY_HAND = {
    "replicated": {"b": 8},
    "fsdp": {"b": 8},
    "megatron": {"b": 2, "mlp": 4, "heads": 4},
    "fsdp+tensor": {"b": 2, "mlp": 4, "heads": 4},
    "sequence": {"b": 2, "mlp": 4, "heads": 4},
    "fsdp+context": {"b": 2, "t": 4},
}
LAYERS = ("query", "key", "value", "post", "ffn_layer1", "ffn_layer2")


@pytest.mark.parametrize("preset", BY_HAND)
def test_parts_of_sums_are_those_of_a_hands_count(preset):
    mesh = preset_runs.mesh_of(preset, SHAPE)
    partitioner = preset_runs.partitioner_of(
        preset_runs.even_lm(), preset, mesh, quantization="int8"
    )
    dense = {
        next(name for name in reversed(path) if name != "linear"): node
        for path, node in nnx.iter_graph(partitioner.task.model.abstract_module())
        if is_dense(node)
    }
    with jax.set_mesh(mesh):
        for name in LAYERS:
            layer = dense[name]
            actual = summing_devices(layer, "bt", layer.product.rows_split)
            letters = layer.equation.split(",")[1].partition("->")[0]
            dims = dict(zip(letters, layer.w.get_metadata()["dim_names"], strict=True))
            named = {dims.get(letter, letter): count for letter, count in actual}
            possible = {"b", "t", *dims.values()}
            expected = {x: count for x, count in BY_HAND[preset].items() if x in possible}
            assert named == expected, name


def sums(preset: str, mesh: Mesh, recipe: str | None) -> list[list]:
    """Returns [kind, dtypes, bytes] of the sums over devices of a train step in bfloat16."""
    lm = preset_runs.even_lm(preset_runs.OF_TPU, fprop_dtype=jnp.bfloat16)
    partitioner = preset_runs.partitioner_of(lm, preset, mesh, quantization=recipe)
    batch = structs(preset_runs.batch_of(8, 128, 512))
    compiled = partitioner.train_step.lower(batch).compile()
    kinds = ("all-reduce", "reduce-scatter")
    return sorted(  # Not of ids, of means and of scales.
        [x.kind, list(x.dtypes), x.bytes * x.count]
        for x in hlo.collectives(compiled)
        if x.kind in kinds and x.bytes > 10_000
    )


@pytest.mark.slow
@pytest.mark.parametrize("preset", nightly_but({"fsdp+tensor", "fsdp+context"}, BY_HAND))
def test_no_devices_sum_integers(preset):
    actual = sums(preset, preset_runs.mesh_of(preset, SHAPE), "int8")
    assert actual and not any("s32" in dtypes for _, dtypes, _ in actual)


@pytest.mark.nightly
@needs_libtpu
def test_a_tpu_sums_rounded_products_as_those_that_are_not_rounded():
    """Of int8 it summed int32, by all-reduces: four times the bytes."""
    actual = printed_by("tests.layers.whole_model.test_summing_devices")
    expected = actual["null"]
    assert any(kind == "reduce-scatter" and dtypes == ["bf16"] for kind, dtypes, _ in expected)
    assert actual["int8"] == expected


def main() -> None:
    """Prints by recipe the sums of a TPU's train step, as JSON."""
    from jax.experimental import mesh_utils, topologies

    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4")
    mesh = mesh_of(mesh_utils.create_device_mesh(SHAPE, topology.devices), preset_runs.AXES)
    print(json.dumps({x: sums("fsdp+tensor", mesh, x) for x in ("int8", None)}))


if __name__ == "__main__":
    sys.exit(main())
