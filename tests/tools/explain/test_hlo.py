"""The figures read from compiled programs, against counts by hand and XLA's own."""

import inspect
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from praxis_lite.core.errors import format_bytes
from praxis_lite.trainer.compilation import current_metadata
from praxis_tools.explain import hlo, hlo_matmuls
from praxis_tools.explain.hlo_layers import layers_of_name, merged_layer, source_line
from tests.support.unknown_loops import unknown_loops

F32 = 4  # bytes


@pytest.fixture
def mesh(mesh_of):
    return mesh_of(1, 4, 2)


def abstract(mesh, shape, *split, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*split)))


def contract(mesh, x, w):
    """Returns x @ w, contracted over the axis mdl: one all-reduce."""
    with jax.named_scope("layer"):
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("data", "mdl")))
        return jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P("data", None)))


def compile_scan(mesh):
    def run(x, w):
        return jax.lax.scan(lambda x, w: (contract(mesh, jnp.tanh(x), w), None), x, w)[0]

    x, w = abstract(mesh, (20, 26), "data"), abstract(mesh, (7, 26, 26), None, "mdl")
    # Split over mdl too, as the loop carries it: no collective after the loop.
    out = NamedSharding(mesh, P("data", "mdl"))
    return jax.jit(run, out_shardings=out).lower(x, w).compile()


def without_trip_counts(compiled):
    text, number = re.subn(r'"known_trip_count":\{"n":"\d+"\}', '"none":0', compiled.as_text())
    assert number > 0
    return text


def test_all_reduce_of_a_sharded_matmul_is_counted_with_its_bytes(mesh):
    x, w = abstract(mesh, (20, 26), "data", "mdl"), abstract(mesh, (26, 37), "mdl")
    compiled = jax.jit(lambda x, w: contract(mesh, x, w)).lower(x, w).compile()
    (item,) = hlo.collectives(compiled)
    assert (item.kind, item.bytes, item.dtypes) == ("all-reduce", 20 // 4 * 37 * F32, ("f32",))
    assert (item.count, item.group_size) == (1, 2)
    assert not item.at_least and not item.at_most
    assert "layer" in item.op_name


def test_scan_of_seven_layers_counts_seven(mesh):
    compiled = compile_scan(mesh)
    assert hlo.summarize(hlo.collectives(compiled)) == {"all-reduce": (7, 7 * 5 * 26 * F32)}
    assert unknown_loops(compiled) == []


def test_trip_count_is_read_from_the_condition_where_it_is_not_stated(mesh):
    compiled = compile_scan(mesh)
    assert hlo.collectives(without_trip_counts(compiled)) == hlo.collectives(compiled)


def test_nested_scans_multiply(mesh):
    def outer(x, ws):
        return jax.lax.scan(lambda x, w: (contract(mesh, jnp.tanh(x), w), None), x, ws)[0], None

    x, w = abstract(mesh, (20, 26), "data"), abstract(mesh, (3, 5, 26, 26), None, None, "mdl")
    compiled = jax.jit(lambda x, w: jax.lax.scan(outer, x, w)[0]).lower(x, w).compile()
    for source in (compiled, without_trip_counts(compiled)):
        assert hlo.summarize(hlo.collectives(source))["all-reduce"][0] == 3 * 5
        assert hlo_matmuls.flops(source) == 3 * 5 * 2 * 5 * 13 * 26


@pytest.mark.parametrize(
    "proceed, step, start, trips",
    [
        (lambda i: i < 13, lambda i: i + 1, 2, 11),
        (lambda i: i <= 12, lambda i: i + 5, 2, 3),
        (lambda i: i >= 2, lambda i: i - 3, 17, 6),
        (lambda i: i > 1, lambda i: i - 4, 17, 4),
        (lambda i: i != 5, lambda i: 1 + i, -2, 7),
        (lambda i: i < 2, lambda i: i + 1, 3, 0),
    ],
)
def test_trip_counts_of_counted_loops(proceed, step, start, trips):
    def run(x, w):
        loop = jax.lax.while_loop(
            lambda state: proceed(state[0]), lambda s: (step(s[0]), s[1] @ w), (start, x)
        )
        return loop[1]

    lowered = jax.jit(run).lower(jnp.ones((3, 5)), jnp.ones((5, 5)))
    # Unoptimized text states no trip count: the reader works it out.
    text = lowered.as_text("hlo")
    assert "known_trip_count" not in text
    assert hlo_matmuls.flops(text) == trips * 2 * 3 * 5 * 5
    assert hlo_matmuls.flops(lowered.compile()) == trips * 2 * 3 * 5 * 5
    # The same comparison with its sides swapped.
    mirror = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}
    swapped = re.sub(
        r"compare\((\S+), (\S+)\), direction=(\w+)",
        lambda m: f"compare({m[2]}, {m[1]}), direction={mirror[m[3]]}",
        text,
    )
    assert swapped != text
    assert hlo_matmuls.flops(swapped) == hlo_matmuls.flops(text)


@pytest.mark.parametrize("loop", ["data", "step"])
def test_unknown_trip_count_is_flagged_and_counts_one_pass(mesh, loop):
    def proceed(state):
        return state[0] < (state[1].sum() if loop == "data" else 100)

    def run(x, w):
        def body(state):
            by = 1 if loop == "data" else state[0] + 1
            return state[0] + by, contract(mesh, state[1], w)

        return jax.lax.while_loop(proceed, body, (0, x))[1]

    x, w = abstract(mesh, (20, 26), "data"), abstract(mesh, (26, 26), "mdl")
    compiled = jax.jit(run).lower(x, w).compile()
    in_body = [c for c in hlo.collectives(compiled) if c.bytes == 5 * 26 * F32]
    assert [(c.count, c.at_least) for c in in_body] == [(1, True)]
    assert len(unknown_loops(compiled)) == 1
    assert ">=1" in hlo.collectives_table(in_body)


def test_loop_that_swaps_its_counters_is_unknown():
    def run(x):
        def body(state):
            i, j, x = state
            return j + 1, i, x @ x

        return jax.lax.while_loop(lambda state: state[0] < 13, body, (0, 5, x))[2]

    text = jax.jit(run).lower(jnp.ones((3, 3))).as_text("hlo")
    assert len(unknown_loops(text)) == 1


def test_branch_is_counted_and_flagged(mesh):
    def run(p, x, w):
        return jax.lax.cond(p, lambda x: contract(mesh, x, w), lambda x: x, x)

    p = jax.ShapeDtypeStruct((), bool)
    x, w = abstract(mesh, (20, 26), "data"), abstract(mesh, (26, 26), "mdl")
    (item,) = hlo.collectives(jax.jit(run).lower(p, x, w).compile())
    assert (item.count, item.at_least, item.at_most) == (1, False, True)
    assert "<=1" in hlo.collectives_table([item])


def test_all_gather_and_group_over_two_axes(mesh):
    gather = jax.jit(lambda x: x * 2, out_shardings=NamedSharding(mesh, P()))
    (item,) = hlo.collectives(gather.lower(abstract(mesh, (24, 13), ("data", "mdl"))).compile())
    assert (item.kind, item.bytes, item.group_size) == ("all-gather", 24 * 13 * F32, 8)


def test_shard_map_collectives_are_named_by_kind(mesh):
    def run(x):
        x = jax.lax.psum_scatter(x, "mdl", scatter_dimension=1, tiled=True)
        x = jax.lax.all_to_all(x, "data", split_axis=0, concat_axis=1, tiled=True)
        return jax.lax.ppermute(x, "data", [(i, (i + 1) % 4) for i in range(4)])

    run = jax.shard_map(run, mesh=mesh, in_specs=P("data"), out_specs=P("data", "mdl"))
    actual = hlo.collectives(jax.jit(run).lower(abstract(mesh, (16, 26), "data")).compile())
    size = 4 * 13 * F32
    # The axis mdl has two devices, data four.
    assert {(c.kind, c.bytes, c.group_size) for c in actual} == {
        ("reduce-scatter", size, 2),
        ("all-to-all", size, 4),
        ("collective-permute", size, None),
    }


def test_program_without_collectives_says_so():
    compiled = jax.jit(lambda x: x + 1).lower(1.0).compile()
    assert hlo.collectives(compiled) == []
    assert hlo.collectives_table([]) == "no collectives"


@pytest.mark.parametrize(
    "size, text", [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (7 * 2**30, "7.0 GiB")]
)
def test_format_bytes(size, text):
    assert format_bytes(size) == text


def test_donated_bytes_of_a_tree_are_exact(mesh):
    state = {
        "w": abstract(mesh, (8, 26), "data", "mdl"),  # per device 2 x 13
        "b": abstract(mesh, (37,), dtype=jnp.bfloat16),
        "step": abstract(mesh, (), dtype=jnp.int32),
    }
    batch = abstract(mesh, (8, 26), "data", "mdl")

    def step(state, batch):
        state = jax.tree.map(lambda x: x + 1, state)
        return {**state, "w": state["w"] + batch}

    shardings = jax.tree.map(lambda x: x.sharding, state)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=shardings)
    compiled = jitted.lower(state, batch).compile()
    assert hlo.num_donated(compiled) == 3
    assert hlo.donated_bytes(compiled) == 2 * 13 * 4 + 37 * 2 + 4
    memory = hlo.memory_per_device(compiled)
    assert memory.aliased == hlo.donated_bytes(compiled)
    assert memory.arguments <= memory.peak - memory.temp < memory.arguments + memory.aliased

    kept = jax.jit(step, out_shardings=shardings).lower(state, batch).compile()
    assert hlo.num_donated(kept) == hlo.donated_bytes(kept) == 0


def test_memory_of_arguments_and_outputs_is_per_device(mesh):
    compiled = compile_scan(mesh)
    memory = hlo.memory_per_device(compiled)
    assert memory.arguments == (5 * 26 + 7 * 13 * 26) * F32
    assert memory.outputs == 5 * 13 * F32
    assert memory.aliased == 0
    assert memory.temp > 0
    assert memory.peak == memory.arguments + memory.outputs + memory.temp


def test_flops_of_scanned_matmuls_and_their_gradients(mesh):
    def loss(w, x):
        return jax.lax.scan(lambda x, w: (contract(mesh, jnp.tanh(x), w), None), x, w)[0].sum()

    x, w = abstract(mesh, (20, 26), "data"), abstract(mesh, (7, 26, 26), None, "mdl")
    item = 2 * 5 * 13 * 26
    assert hlo_matmuls.flops(jax.jit(loss).lower(w, x).compile()) == 7 * item
    # Backward: one matmul each for x and w; x's of the first layer is computed too.
    assert hlo_matmuls.flops(jax.jit(jax.grad(loss)).lower(w, x).compile()) == 3 * 7 * item


def test_flops_of_batched_dots_and_of_matmuls_large_enough_for_a_library_call():
    q = jax.ShapeDtypeStruct((2, 13, 3, 7), jnp.float32)
    scores = jax.jit(lambda q, k: jnp.einsum("bthk,bshk->bhts", q, k)).lower(q, q).compile()
    assert hlo_matmuls.flops(scores) == 2 * 2 * 3 * 13 * 13 * 7
    for dtype in (jnp.float32, jnp.bfloat16):
        a, b = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((509, 769), (769, 257)))
        compiled = jax.jit(lambda a, b: jax.nn.relu(a @ b)).lower(a, b).compile()
        assert hlo_matmuls.flops(compiled) == 2 * 509 * 769 * 257


@pytest.mark.parametrize(
    "settings",
    [
        {"padding": "VALID"},
        {"padding": ((1, 1), (2, 0))},
        {"padding": "SAME", "window_strides": (2, 3)},
        {"padding": "VALID", "rhs_dilation": (2, 1)},
        {"padding": ((2, 2), (0, 1)), "lhs_dilation": (2, 3)},
        {"padding": "VALID", "feature_group_count": 3},
    ],
)
def test_flops_of_a_convolution_are_xlas_own(settings):
    settings = {"window_strides": (1, 1), **settings}
    groups = settings.get("feature_group_count", 1)
    x = jax.ShapeDtypeStruct((2, 13, 11, 6), jnp.float32)
    w = jax.ShapeDtypeStruct((3, 5, 6 // groups, 9), jnp.float32)
    dims = ("NHWC", "HWIO", "NHWC")
    run = jax.jit(
        lambda x, w: jax.lax.conv_general_dilated(x, w, dimension_numbers=dims, **settings)
    )
    text = run.lower(x, w).as_text("hlo")
    assert hlo_matmuls.flops(text) == run.lower(x, w).cost_analysis()["flops"]


def test_windows_meet_as_many_elements_as_a_count_of_each_says():
    def counted(size, window, outputs, stride, pad, hole, spread):
        places = (
            tap * spread - pad + output * stride
            for tap in range(window)
            for output in range(outputs)
        )
        return sum(place in range(0, (size - 1) * hole + 1, hole) for place in places)

    rng = np.random.default_rng(0)
    low, high = (1, 1, 1, 1, -3, 1, 1), (9, 9, 12, 6, 9, 7, 5)
    for row in rng.integers(low, high, (500, len(low)), endpoint=True).tolist():
        assert hlo_matmuls.window_hits(*row) == counted(*row), row


def test_a_batch_of_many_experts_rows_is_counted_at_once():
    """A TPU's product with a batch of 65,536: a count of each place took an hour."""
    assert hlo_matmuls.window_hits(65_536, 65_536, 65_536, 65_535, 0, 65_536, 1) == 65_536


# What jax 0.12.0 compiled for a v5e 2x4, shortened: no trip count, dots as convolutions, one
# all-gather in three fusions, a permute in start and done.
TPU = """\
HloModule jit_f, is_scheduled=true, num_partitions=8

%start (p.0: bf16[1,128,1024]) -> (bf16[1,128,1024], bf16[1,512,1024], /*index=2*/u32[]) {
  %p.0 = bf16[1,128,1024]{2,1,0:T(8,128)(2,1)S(1)} parameter(0)
  %all-gather.1 = bf16[1,512,1024]{2,1,0:T(8,128)(2,1)} all-gather(%p.0), channel_id=13, \
replica_groups=[2,4]<=[4,2]T(1,0), dimensions={1}, metadata={op_name="jit(f)/while/body/squeeze"}
  ROOT %custom-call.4 = (bf16[1,128,1024]{2,1,0}, bf16[1,512,1024]{2,1,0}, \
/*index=2*/u32[]{:S(2)}) custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}

%done (p.1: bf16[1,128,1024], p.2: u32[]) -> bf16[1,512,1024] {
  %p.1 = bf16[1,128,1024]{2,1,0:T(8,128)(2,1)S(1)} parameter(0)
  %p.2 = u32[]{:S(2)} parameter(1)
  %all-gather.2 = bf16[1,512,1024]{2,1,0:T(8,128)(2,1)} all-gather(%p.1), channel_id=13, \
replica_groups=[2,4]<=[4,2]T(1,0), dimensions={1}, metadata={op_name="jit(f)/while/body/squeeze"}
  ROOT %custom-call.5 = bf16[1,512,1024]{2,1,0} custom-call(%all-gather.2), \
custom_call_target="AsyncCollectiveDone"
}

%body (state.0: (s32[], bf16[256,512], bf16[1,128,1024])) -> (s32[], bf16[256,512], bf16[1,128,\
1024]) {
  %one.0 = s32[]{:T(128)} constant(1)
  %state.0 = (s32[]{:T(128)}, bf16[256,512]{1,0:T(8,128)(2,1)S(1)}, bf16[1,128,1024]{2,1,0}) \
parameter(0)
  %i.0 = s32[]{:T(128)} get-tuple-element(%state.0), index=0
  %x.0 = bf16[256,512]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%state.0), index=1
  %w.0 = bf16[1,128,1024]{2,1,0:T(8,128)(2,1)} get-tuple-element(%state.0), index=2
  %async-start = (bf16[1,128,1024]{2,1,0}, bf16[1,512,1024]{2,1,0}, /*index=2*/u32[]{:S(2)}) \
fusion(%w.0), kind=kCustom, calls=%start
  %context = u32[]{:S(2)} get-tuple-element(%async-start), index=2
  %gathered = bf16[1,512,1024]{2,1,0:T(8,128)(2,1)} fusion(%w.0, %context), kind=kCustom, \
calls=%done
  %w.1 = bf16[512,1024]{1,0:T(8,128)(2,1)} bitcast(%gathered)
  %dot.0 = bf16[256,1024]{1,0:T(8,128)(2,1)} convolution(%x.0, %w.1), dim_labels=bf_io->bf
  %dot.1 = bf16[256,512]{1,0:T(8,128)(2,1)} convolution(%dot.0, %w.1), dim_labels=bf_oi->bf
  %permute-start = (bf16[256,512]{1,0:T(8,128)(2,1)}, bf16[256,512]{1,0}, u32[]{:S(2)}, \
u32[]{:S(2)}) collective-permute-start(%dot.1), channel_id=2, source_target_pairs={{0,2},{2,0}}
  %permute-done = bf16[256,512]{1,0} collective-permute-done(%permute-start)
  %i.1 = s32[]{:T(128)} add(%i.0, %one.0), backend_config={"aliasing_operands":{"lists":[]}}
  ROOT %state.1 = (s32[]{:T(128)}, bf16[256,512]{1,0}, bf16[1,128,1024]{2,1,0}) tuple(%i.1, \
%permute-done, %w.0)
}

%condition (state.2: (s32[], bf16[256,512], bf16[1,128,1024])) -> pred[] {
  %seven = s32[]{:T(128)} constant(7)
  %state.2 = (s32[]{:T(128)}, bf16[256,512]{1,0}, bf16[1,128,1024]{2,1,0}) parameter(0)
  %i.2 = s32[]{:T(128)} get-tuple-element(%state.2), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i.2, %seven), direction=LT
}

ENTRY %main (x: bf16[256,512], w: bf16[1,128,1024]) -> bf16[256,512] {
  %zero = s32[]{:T(128)} constant(0)
  %x = bf16[256,512]{1,0:T(8,128)(2,1)} parameter(0)
  %w = bf16[1,128,1024]{2,1,0:T(8,128)(2,1)} parameter(1)
  %copy = s32[]{:T(128)} copy(%zero)
  %state = (s32[]{:T(128)}, bf16[256,512]{1,0}, bf16[1,128,1024]{2,1,0}) tuple(%copy, %x, %w)
  %while = (s32[]{:T(128)}, bf16[256,512]{1,0}, bf16[1,128,1024]{2,1,0}) while(%state), \
condition=%condition, body=%body, metadata={op_name="jit(f)/while"}
  ROOT %out = bf16[256,512]{1,0} get-tuple-element(%while), index=1
}
"""


def test_text_for_a_tpu():
    gather, permute = hlo.collectives(TPU)
    assert (gather.kind, gather.count, gather.bytes) == ("all-gather", 7, 512 * 1024 * 2)
    assert (gather.group_size, gather.op_name) == (4, "jit(f)/while/body/squeeze")
    assert (permute.kind, permute.count, permute.bytes) == ("collective-permute", 7, 256 * 512 * 2)
    assert hlo_matmuls.flops(TPU) == 7 * 2 * (2 * 256 * 512 * 1024)
    assert unknown_loops(TPU) == []


def test_a_tpus_reduce_scatters_are_counted_though_they_share_a_channel():
    # Of jax 0.10.2, v5e 2x4, abridged: two fusions in one scope, one of them of two arrays.
    text = """\
HloModule jit_f, num_partitions=8

%all-reduce-scatter.6 (input.6: f32[512,4096]) -> f32[512,512] {
  %input.6 = f32[512,4096]{1,0:T(8,128)S(1)} parameter(0)
  %all-reduce.53 = f32[512,4096]{1,0:T(8,128)} all-reduce(%input.6), channel_id=1, \
replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  %zero.6 = u32[] constant(0)
  %partition-id.23 = u32[] partition-id()
  ROOT %dynamic-slice.81 = f32[512,512]{1,0:T(8,128)} dynamic-slice(%all-reduce.53, %zero.6, \
%partition-id.23), dynamic_slice_sizes={512,512}
}

%all-reduce-scatter.8 (input_0.5: f32[64,8], input_1.5: bf16[8,64]) -> (f32[8,8], bf16[8,8]) {
  %input_0.5 = f32[64,8]{1,0} parameter(0)
  %input_1.5 = bf16[8,64]{1,0} parameter(1)
  %all-reduce.64 = (f32[64,8]{1,0}, bf16[8,64]{1,0}) all-reduce(%input_0.5, %input_1.5), \
channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  %get-tuple-element.1 = f32[64,8]{1,0} get-tuple-element(%all-reduce.64), index=0
  %zero.8 = u32[] constant(0)
  %partition-id.31 = u32[] partition-id()
  %dynamic-slice.1 = f32[8,8]{1,0} dynamic-slice(%get-tuple-element.1, %partition-id.31, %zero.8)
  %get-tuple-element.2 = bf16[8,64]{1,0} get-tuple-element(%all-reduce.64), index=1
  %dynamic-slice.2 = bf16[8,8]{1,0} dynamic-slice(%get-tuple-element.2, %zero.8, %partition-id.31)
  ROOT %tuple.1 = (f32[8,8]{1,0}, bf16[8,8]{1,0}) tuple(%dynamic-slice.1, %dynamic-slice.2)
}

ENTRY %main (a: f32[512,4096], b: f32[64,8], c: bf16[8,64]) -> f32[512,512] {
  %a = f32[512,4096]{1,0} parameter(0)
  %b = f32[64,8]{1,0} parameter(1)
  %c = bf16[8,64]{1,0} parameter(2)
  %fusion.2 = (f32[8,8]{1,0}, bf16[8,8]{1,0}) fusion(%b, %c), kind=kCustom, \
calls=%all-reduce-scatter.8
  ROOT %fusion.1 = f32[512,512]{1,0} fusion(%a), kind=kCustom, calls=%all-reduce-scatter.6
}
"""
    actual = [(one.kind, one.bytes, one.dtypes, one.group_size) for one in hlo.collectives(text)]
    assert actual == [
        ("reduce-scatter", 8 * 8 * (4 + 2), ("f32", "bf16"), 8),
        ("reduce-scatter", 512 * 512 * 4, ("f32",), 8),
    ]


def test_batched_dot_of_a_tpu_is_not_counted_window_by_window():
    # einsum('bthk,bshk->bhts') of bf16[2,256,8,128] on jax 0.12.0, v5e.
    text = """\
HloModule jit_f

ENTRY %main (q: bf16[2,8,256,128], k: bf16[2,8,256,128]) -> bf16[2,8,256,256] {
  %q = bf16[2,8,256,128]{3,2,1,0:T(8,128)(2,1)} parameter(0)
  %k = bf16[2,8,256,128]{3,2,1,0:T(8,128)(2,1)} parameter(1)
  ROOT %out = bf16[2,8,256,256]{3,2,1,0:T(8,128)(2,1)} convolution(%q, %k), \
window={size=2x8 stride=1x7 lhs_dilate=2x8}, dim_labels=01bf_01oi->01bf
}
"""
    assert hlo_matmuls.flops(text) == 2 * (2 * 8) * 256 * 256 * 128


@pytest.mark.parametrize(
    "start, size",
    [
        ("f32[13]{0} all-reduce-start(%a)", 13 * 4),
        ("(f32[13]{0}, bf16[7]{0}) all-reduce-start(%a, %b)", 13 * 4 + 7 * 2),
        ("(f32[13]{0}, f32[26]{0}) all-gather-start(%a)", 26 * 4),
        ("((f32[13]{0}, bf16[7]{0}), (f32[26]{0}, bf16[14]{0})) all-gather-start(%a, %b)", 132),
        ("((f32[26]{0}), f32[13]{0}, u32[]) reduce-scatter-start(%c)", 13 * 4),
        ("((f32[26]{0}), f32[26]{0}) async-start(%c), calls=%wrapped", 26 * 4),
    ],
)
def test_async_start_and_done_count_once_with_the_bytes_of_the_result(start, size):
    done = "async-done(%start), calls=%wrapped" if "async" in start else "some-done(%start)"
    text = f"""\
HloModule m, num_partitions=6

%wrapped (p: f32[26]) -> f32[26] {{
  %p = f32[26]{{0}} parameter(0)
  ROOT %r = f32[26]{{0}} all-to-all(%p), replica_groups={{}}
}}

ENTRY %main (a: f32[13], b: bf16[7], c: f32[26]) -> f32[13] {{
  %a = f32[13]{{0}} parameter(0)
  %b = bf16[7]{{0}} parameter(1)
  %c = f32[26]{{0}} parameter(2)
  %start = {start}, replica_groups={{}}
  ROOT %done = f32[13]{{0}} {done}
}}
"""
    (item,) = hlo.collectives(text)
    assert (item.count, item.bytes, item.group_size) == (1, size, 6)


def test_flops_of_a_cublas_call():
    text = """\
HloModule m

ENTRY e {
  a = f32[32,64]{1,0} parameter(0)
  b = f32[64,16]{1,0} parameter(1)
  ROOT g = (f32[32,16]{1,0}, s8[0]{0}) custom-call(a, b), custom_call_target="__cublas$gemm", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
}
"""
    assert hlo_matmuls.flops(text) == 2 * 32 * 64 * 16


def test_donated_element_of_a_tuple_parameter():
    text = """\
HloModule m, input_output_alias={ {0}: (0, {1}, may-alias), {1}: (1, {}, must-alias) }, n=1

ENTRY e {
  p = (f32[7]{0}, (bf16[3]{0}, s32[])) parameter(0)
  ROOT q = f32[5]{0} parameter(1)
}
"""
    assert (hlo.num_donated(text), hlo.donated_bytes(text)) == (3, 3 * 2 + 4 + 5 * 4)


def test_text_that_is_no_hlo_is_refused():
    with pytest.raises(ValueError, match="as_text"):
        hlo.collectives("module @jit_f {}")


@pytest.mark.parametrize(
    ("op_name", "layers"),
    [
        ("jit(step)/encoder/blocks/0/ffn/dot_general", ["encoder/blocks/0/ffn"]),
        # Linen's, under vmap; einsum opens a scope named after its equation.
        ("jit(step)/vmap(ViT)/head/...d,df->...f/dot_general", ["ViT/head"]),
        # jax 0.10, then 0.12, of one scanned and rematerialized layer.
        ("jit(f)/jvp(lm)/while/body/closed_call/blocks/key/dot_general", ["lm/blocks/key"]),
        (
            "jit(f)/transpose(jvp(lm))/while/body/closed_call/checkpoint/rematted_computation/"
            "blocks/key/dot_general",
            ["gradient of lm/blocks/key"],
        ),
        (
            "jit(f)/transpose(jvp(lm))/while/body/eval_jaxpr/checkpoint/blocks/key/dot_general",
            ["gradient of lm/blocks/key"],
        ),
        # The backward pass of a jax.checkpoint outside any loop says all of it twice.
        (
            "jit(f)/transpose(jvp(lm))/blocks/0/jvp(lm)/blocks/0/checkpoint/key/dot_general",
            ["gradient of lm/blocks/0/key"],
        ),
        ("jit(f)/learner/jvp(blocks)/blocks/dot_general", ["learner/blocks/blocks"]),
        # Functions are no layers, nor are the names of operations.
        ("jit(f)/jvp(jit(_take))/gather", [""]),
        ("jit(f)/jvp(softmax)/jit(_take)/scatter-add", ["softmax"]),
        ("jit(f)/cond/branch_1_fun/router/while/cond/lt", ["router"]),
        ("jit(f)/shard_map/custom_vjp_call/ffn/psum_invariant", ["ffn"]),
        ("add", [""]),
        ("", [""]),
        # Merged by XLA: what they share stands before the bracket.
        (
            "jit(f)/transpose(jvp(lm))/blocks/(ffn/bias/reduce_sum:...d,dnk->...nk/dot_general)",
            ["gradient of lm/blocks/ffn/bias", "gradient of lm/blocks"],
        ),
        (
            "jit(f)/(reduce_sum:transpose(jvp(ln))/reduce_sum:jvp(softmax)/(a/max:b/max))",
            ["", "gradient of ln", "softmax/a", "softmax/b"],
        ),
    ],
)
def test_layers_of_a_name(op_name, layers):
    assert layers_of_name(op_name) == layers


def test_what_is_in_no_layer_has_its_source_line():
    name = "jit(f)/(jvp(ffn)/max:transpose(jvp())/reduce_sum:add)"
    assert layers_of_name(name, "m.py:7") == ["ffn", "gradient of m.py:7", "m.py:7"]


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        (["lm/ffn"], "lm/ffn"),
        (["lm/ffn/w", "lm/ffn"], "several in lm/ffn"),
        (["gradient of lm/ff1", "gradient of lm/ff2"], "gradient of several in lm"),
        (["gradient of lm/ffn", "lm/ffn"], "several in lm/ffn"),
        (["lm/ffn", ""], "several (lm)"),
        (["ln", "lm/ffn", "gradient of lm/ffn", "gradient of m.py:7"], "several (ln, lm, m.py:7)"),
        (["a/x", "b/x", "c/x", "d/x"], "several (a, b, c, ...)"),
    ],
)
def test_merged_layers_in_one_text(layers, text):
    assert merged_layer(dict.fromkeys(layers, 7)) == merged_layer(dict.fromkeys(layers, 0)) == text
    if len(layers) > 1:
        # Below a hundredth of the bytes a layer is not spoken of.
        small = dict.fromkeys(layers[1:], 1)
        assert merged_layer({layers[0]: 99, layers[1]: 1}) != layers[0]
        assert merged_layer({layers[0]: 100 * len(small), **small}) == layers[0]


OURS = str(Path(hlo.__file__).parent)


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        # A user's model, which Flax's code and this library's call.
        (
            [
                "/x/site-packages/flax/nnx/nn/linear.py",
                "/home/me/model.py",
                f"{OURS}/steps.py",
                "/home/me/main.py",
            ],
            "model.py:2",
        ),
        # No user's: the library's own line, not that of who launched it.
        (["/x/site-packages/optax/a.py", f"{OURS}/learner.py", "/home/me/main.py"], "learner.py:2"),
        (["/x/site-packages/flax/a.py", f"{OURS}/learner.py"], "learner.py:2"),
        # Without this library.
        (["/x/dist-packages/jax/b.py", "/home/me/a.py", "/home/me/main.py"], "a.py:2"),
        ([], ""),
    ],
)
def test_the_source_line_is_the_users(frames, text):
    assert source_line([(file, i + 1) for i, file in enumerate(frames)]) == text


def test_a_collective_in_no_layer_is_told_by_the_line_of_the_model(mesh):
    def line():
        return inspect.currentframe().f_back.f_lineno

    lines = []

    def model(x, w):
        lines.append(line() + 1)
        y = jnp.tanh(x) @ w
        return jax.lax.with_sharding_constraint(y, NamedSharding(mesh, P("data", None)))

    x, w = abstract(mesh, (20, 26), "data", "mdl"), abstract(mesh, (26, 37), "mdl")
    grad = jax.grad(lambda w, x: model(x, w).sum() ** 2)
    with current_metadata():
        (item,) = hlo.collectives(jax.jit(model).lower(x, w).compile())
        actual = hlo.collectives(jax.jit(grad).lower(w, x).compile())
    assert item.layer == f"test_hlo.py:{lines[0]}"
    # Differentiated, by the same line.
    assert f"gradient of test_hlo.py:{lines[-1]}" in {c.layer for c in actual}


def test_a_line_is_that_of_the_current_code_and_not_of_a_program_in_the_cache(mesh):
    def layer(num_lines_above):
        names = {"jax": jax, "split": NamedSharding(mesh, P("data", None))}
        source = "def model(x, w):\n    return jax.lax.with_sharding_constraint(x @ w, split)"
        exec(compile("\n" * num_lines_above + source, "/home/me/model.py", "exec"), names)
        x, w = abstract(mesh, (20, 26), "data", "mdl"), abstract(mesh, (26, 41), "mdl")
        with current_metadata():
            (item,) = hlo.collectives(jax.jit(names["model"]).lower(x, w).compile())
        return item.layer

    assert [layer(3), layer(11)] == ["model.py:5", "model.py:13"]


def test_merged_collectives_have_the_layers_of_all_their_parts(mesh):
    def loss(ws, x):
        for i, w in enumerate(ws):
            with jax.named_scope(f"stack/layer_{i}"):
                x = jnp.tanh(x @ w)
        return (x**2).sum()

    ws = [abstract(mesh, (7 + 2 * i, 9 + 2 * i)) for i in range(3)]
    compiled = jax.jit(jax.grad(loss)).lower(ws, abstract(mesh, (8, 7), "data")).compile()
    (item,) = hlo.collectives(compiled)
    parts = {f"gradient of stack/layer_{i}": (7 + 2 * i) * (9 + 2 * i) * F32 for i in range(3)}
    assert dict(item.layers) == parts and item.bytes == sum(parts.values())
    assert item.layer == "gradient of several in stack"


def test_an_argument_gathered_as_it_comes_is_named(mesh):
    gather = jax.jit(lambda state: state["ffn"]["w"], out_shardings=NamedSharding(mesh, P()))
    lowered = gather.lower({"ffn": {"w": abstract(mesh, (24, 13), "data")}})
    text = re.sub(r"(all-gather\(.*?), metadata=\{[^}]*\}", r"\1", lowered.compile().as_text())
    assert hlo.collectives(text)[0].layer == "state/ffn/w"


def test_table_lists_below_a_kind_its_layers_with_the_most_bytes_first():
    def one(kind, layer, count, size, at_least=False):
        return hlo.Collective(kind, size, ("f32",), count, at_least, False, 2, "", ((layer, size),))

    actual = [
        one("all-reduce", "a/norm", 7, 10),
        one("all-gather", "a/ffn", 3, 1024),
        one("all-reduce", "a/ffn", 2, 1024),
        one("all-reduce", "a/norm", 1, 5, at_least=True),
    ]
    lines = [re.split(r"  +", line.strip()) for line in hlo.collectives_table(actual).splitlines()]
    assert lines == [
        ["collective", "count", "bytes"],
        ["all-reduce", ">=10", ">=2.1 KiB"],
        ["a/ffn", "2", "2.0 KiB"],
        ["a/norm", ">=8", ">=75 B"],
        ["all-gather", "3", "3.0 KiB"],
        ["a/ffn", "3", "3.0 KiB"],
    ]


@pytest.mark.parametrize(
    "place",
    ['source_file="/home/me/model.py" source_line=13', "stack_frame_id=2"],
)
def test_source_lines_in_both_spellings(place):
    # Frames count from one, their parents too: 2 is the first.
    text = f"""\
HloModule m

FileNames
1 "/home/me/main.py"
2 "/home/me/model.py"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=5 end_line=5 column=2 end_column=2}}
2 {{file_name_id=2 function_name_id=2 line=13 end_line=13 column=2 end_column=9}}

StackFrames
1 {{file_location_id=1 parent_frame_id=1}}
2 {{file_location_id=2 parent_frame_id=2}}

ENTRY %main (a: f32[13]) -> f32[13] {{
  %a = f32[13]{{0}} parameter(0)
  ROOT %r = f32[13]{{0}} all-reduce(%a), replica_groups={{}}, to_apply=%add, \
metadata={{op_name="jit(f)/add" {place}}}
}}
"""
    assert hlo.collectives(text)[0].layer == "model.py:13"
