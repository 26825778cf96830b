"""assert_collectives: what it lets pass, and what it names where a budget is passed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from praxis_lite import ConfigError
from praxis_lite.core import StateLayout
from praxis_lite.experiments import lm
from praxis_tools.check import CompiledStep, assert_collectives, compiled_step
from praxis_tools.explain.hlo import Collective


@pytest.fixture(scope="module")
def step():
    return compiled_step(lm.Synthetic)


def test_a_budget_is_kept_to_the_byte(step):
    actual = sum(item.count * item.bytes for item in step.collectives if "mdl" in item.axes)
    assert actual > 0
    assert_collectives(step, max_bytes_over={"mdl": actual})
    with pytest.raises(AssertionError) as error:
        assert_collectives(step, max_bytes_over={"mdl": actual - 1})
    text = str(error.value)
    assert f"{actual:,} bytes, " in text and f"{actual - 1:,}" in text
    largest = max((c for c in step.collectives if "mdl" in c.axes), key=lambda c: c.count * c.bytes)
    assert largest.layer in text and f"({largest.source})" in text and ".py:" in largest.source


def test_all_axes_together(step):
    whole = sum(collective.count * collective.bytes for collective in step.collectives)
    assert_collectives(step, max_bytes=whole)
    with pytest.raises(AssertionError, match="all collectives: "):
        assert_collectives(step, max_bytes=whole - 1)


def test_an_unknown_axis_is_refused(step):
    with pytest.raises(ConfigError, match="modl"):
        assert_collectives(step, max_bytes_over={"modl": 1})


def test_gathers_in_a_backward_pass(step):
    assert_collectives(step, no_gather_in_backward_of=["transformer/blocks/nothing"])
    with pytest.raises(AssertionError, match="transformer/blocks/ff_layer"):
        assert_collectives(step, no_gather_in_backward_of=["transformer/blocks/ff_layer"])


def test_whole_weights_are_gathered_by_fsdp_and_not_by_megatron(step):
    with pytest.raises(AssertionError, match="mdl_vars/params"):
        assert_collectives(step, no_gather_of_full_weights=True)

    class Megatron(lm.Synthetic):
        SHARDING_PRESET = "megatron"

    assert_collectives(
        compiled_step(Megatron, "eval", mesh=(1, 4, 2)), no_gather_of_full_weights=True
    )


def test_only_weights_that_are_split_can_be_gathered_entirely():
    split = {"over_two": P("mdl"), "over_four": P("data"), "replicated": P(None)}
    sizes = {"over_two": 26, "over_four": 28, "replicated": 29}
    shapes = {name: jax.ShapeDtypeStruct((size,), np.float32) for name, size in sizes.items()}
    layout = StateLayout(
        {"mdl_vars": {"params": shapes}}, {"mdl_vars": {"params": split}}, {"data": 4, "mdl": 2}
    )
    for name, size in sizes.items():
        gather = Collective(
            "all-gather", 4 * size, ("f32",), 1, False, False, 8, "", (), ("data",), "", ((size,),)
        )
        step = CompiledStep("train", [gather], layout)
        if name == "replicated":
            assert_collectives(step, no_gather_of_full_weights=True)
            continue
        with pytest.raises(AssertionError, match=f"size of mdl_vars/params/{name}"):
            assert_collectives(step, no_gather_of_full_weights=True)


def test_reshardings_above_a_size(step):
    gather = Collective(
        "all-to-all",
        4096,
        ("f32",),
        3,
        False,
        False,
        8,
        "",
        (("encoder", 4096),),
        ("data",),
        "model.py:13",
        ((32, 32),),
    )
    result = CompiledStep("train", [gather], step.layout)
    assert_collectives(result, max_resharding_bytes=4096)
    with pytest.raises(AssertionError) as error:
        assert_collectives(result, max_resharding_bytes=4095)
    assert "all-to-all over data of encoder (model.py:13), 3 x 4,096 bytes" in str(error.value)
    assert "4,095 bytes" in str(error.value)


def test_a_partitioner_of_ones_own(mesh_of):
    from praxis_lite.config.build import build
    from praxis_lite.core import Partitioner

    partitioner = Partitioner(build(lm.Synthetic().config()).task, mesh_of(1, 8, 1))
    ids = jax.ShapeDtypeStruct((16, 32), jnp.int32)
    batch = {"ids": ids, "labels": ids, "weights": jax.ShapeDtypeStruct((16, 32), jnp.float32)}
    result = compiled_step(partitioner, "eval", batch=batch)
    assert {axis for collective in result.collectives for axis in collective.axes} == {"data"}
    with pytest.raises(TypeError, match="batch"):
        compiled_step(partitioner)
