"""What instructions cost, against hand counts; what splash computes, against its mask."""

import dataclasses
import math
import re

import numpy as np
import pytest

from praxis_lite.layers.attention.kernels.einsum import LogitOptions
from praxis_lite.layers.attention.kernels.splash_kernels import JaxSplash
from praxis_lite.layers.attention.masks import AttentionMask
from praxis_tools.explain.hlo_text import parse
from praxis_tools.explain.kernels import kernel_flops
from praxis_tools.plan.chips import CHIPS
from praxis_tools.plan.costs import (
    Efficiencies,
    bytes_moved,
    compute_seconds,
)
from praxis_tools.plan.schedule.collective_cost import CollectiveSpec, collective_seconds
from praxis_tools.plan.schedule.copies import bytes_in_hbm
from praxis_tools.plan.schedule.schedule import schedule
from praxis_tools.plan.topology import PhysicalMesh

PLAIN = Efficiencies(
    cycles=1.0, kernel=1.0, matmul=1.0, link=1.0, network=1.0, hop_seconds=0.0, network_seconds=0.0
)
V5E, H100 = CHIPS["v5e"], CHIPS["h100"]

TEXT = """HloModule m

%fused (s: f32[4,512,256], i: s32[]) -> f32[512,256] {
  %s = f32[4,512,256] parameter(0)
  %i = s32[] parameter(1)
  %one = f32[1,512,256] dynamic-slice(%s, %i), dynamic_slice_sizes={1,512,256}
  ROOT %b = f32[512,256] bitcast(%one)
}

ENTRY %main (a: bf16[512,128], b: bf16[128,256], s: f32[4,512,256], i: s32[]) -> f32[512,256] {
  %a = bf16[512,128] parameter(0)
  %b = bf16[128,256] parameter(1)
  %s = f32[4,512,256] parameter(2)
  %i = s32[] parameter(3)
  %d = bf16[512,256] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %timed = bf16[512,256] negate(%d), backend_config={"estimated_cycles":"3000"}
  %q = bf16[2,4,1024,128] broadcast(%i)
  %k = bf16[2,2,2048,128] broadcast(%i)
  %blocks = s8[1,64,64] broadcast(%i)
  %dkv = bf16[2,4,1024,128] custom-call(%i, %blocks, %q, %k, %k), \
custom_call_target="tpu_custom_call", \
frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 512}"
},share_of_blocks="0.250000"}, metadata={op_name="a/splash_mha_dkv/pallas_call"}
  %aliased = bf16[2,3,4,1024,128] broadcast(%i)
  %dq_too = (bf16[2,3,4,1024,128], f32[2,2,2048,128], f32[2,2,2048,128]) custom-call(%i, %blocks, \
%q, %k, %k, %q, %aliased), custom_call_target="tpu_custom_call", \
frontend_attributes={share_of_blocks="0.250000"}, \
metadata={op_name="a/splash_mha_dkv_segmented_no_residuals/pallas_call"}
  %rows = bf16[640,128] broadcast(%i)
  %experts = bf16[4,128,256] broadcast(%i)
  %offsets = s32[5] broadcast(%i)
  %gmm.3 = bf16[640,256] custom-call(%i, %offsets, %rows, %experts), \
custom_call_target="tpu_custom_call", \
frontend_attributes={kernel_metadata={},share_of_blocks="0.800000"}
  %tgmm.1 = bf16[4,128,256] custom-call(%i, %offsets, %rows, %gmm.3), \
custom_call_target="tpu_custom_call", \
frontend_attributes={kernel_metadata={},share_of_blocks="0.800000"}
  %gmm_megablox_transpose_rhs.2 = bf16[640,256] custom-call(%i, %offsets, %rows, %experts), \
custom_call_target="tpu_custom_call", frontend_attributes={share_of_blocks="0.800000"}
  %tgmm_megablox.1 = bf16[4,128,256] custom-call(%i, %offsets, %rows, %gmm.3), \
custom_call_target="tpu_custom_call", frontend_attributes={share_of_blocks="0.800000"}
  %begun = ((f32[4,512,256], s32[]), f32[512,256], u32[]) fusion-start(%s, %i), kind=kLoop, \
calls=%fused
  %done = f32[512,256] fusion-done(%begun)
  %causal = (bf16[2,4,1000,128], u8[0]) custom-call(%q, %k, %k), \
custom_call_target="__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config":\
{"intermediate_tensor_shape":{"dimensions":["2","4","1000","1000"]},"mask_type":"CAUSAL",\
"sliding_window_length":0}}
  %windows = (bf16[2,4,1000,128], u8[0]) custom-call(%q, %k, %k), \
custom_call_target="__cudnn$fmhaSoftmaxBackward", backend_config={"cudnn_fmha_backend_config":\
{"intermediate_tensor_shape":{"dimensions":["2","4","1000","1000"]},\
"mask_type":"PADDING_CAUSAL","sliding_window_length":10}}
  %full = (bf16[2,4,1000,128], u8[0]) custom-call(%q, %k, %k), \
custom_call_target="__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config":\
{"intermediate_tensor_shape":{"dimensions":["2","4","1000","700"]},"mask_type":"NO_MASK"}}
  ROOT %f = f32[512,256] fusion(%s, %i), kind=kLoop, calls=%fused
}
"""
PROGRAM = parse(TEXT)
MAIN = PROGRAM.computations[PROGRAM.entry]


def seconds(name, chip):
    return compute_seconds(MAIN[name], MAIN, PROGRAM, chip, PLAIN)


def test_cycles_over_the_clock_and_a_roofline_without():
    assert seconds("timed", V5E) == pytest.approx(3000 / V5E.clock)
    assert seconds("d", V5E) == 0.0  # A TPU's instruction without cycles is free.
    flops = 2 * 512 * 256 * 128 / H100.peak()
    moved = 2 * (512 * 128 + 128 * 256 + 512 * 256) / H100.hbm_bandwidth
    assert seconds("d", H100) == pytest.approx(max(flops, moved))


@pytest.mark.parametrize(
    ("chip", "dims", "share"),
    [
        ("v5e", 128, 1.0),
        ("v6e", 128, 0.5),
        ("tpu7x", 128, 0.5),
        ("v6e", 256, 1.0),
        ("v5p", 192, 0.75),
        ("v6e", 192, 0.75),
        ("v4", 64, 0.5),
    ],
)
def test_heads_that_do_not_fill_a_matmul_unit_leave_the_rest_of_it_idle(chip, dims, share):
    program = parse(TEXT.replace(",128] broadcast", f",{dims}] broadcast"))
    main, of = program.computations[program.entry], CHIPS[chip]
    actual = compute_seconds(main["dkv"], main, program, of, PLAIN)
    # Four matmuls of a quarter of the blocks.
    flops = 4 * 2 * (2 * 4 * 1024 * dims) * 2048 / 4
    assert actual == pytest.approx(flops / (of.peak() * share))


OF_TYPES = """HloModule m

ENTRY %main (a: s8[512,128], b: s8[128,256], c: bf16[128,256], e: f8e5m2[512,128], \
f: f8e4m3fn[128,256]) -> f32[512,256] {
  %a = s8[512,128] parameter(0)
  %b = s8[128,256] parameter(1)
  %c = bf16[128,256] parameter(2)
  %e = f8e5m2[512,128] parameter(3)
  %f = f8e4m3fn[128,256] parameter(4)
  %s8 = s32[512,256] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %mixed = f32[512,256] dot(%a, %c), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %f8e5m2 = f32[512,256] dot(%e, %f), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


def test_a_matmul_is_timed_at_the_peak_of_the_wider_of_its_operands_types():
    program = parse(OF_TYPES)
    around = program.computations[program.entry]
    # A memory so fast that only the matmul counts.
    chip = dataclasses.replace(H100, hbm_bandwidth=1e18)
    flops = 2 * 512 * 256 * 128
    for name, peak in (("s8", 1979e12), ("mixed", 989e12), ("f8e5m2", 1979e12)):
        actual = compute_seconds(around[name], around, program, chip, PLAIN)
        assert actual == pytest.approx(flops / peak), name


def test_notes_say_the_share_of_each_narrow_type_and_what_the_chip_gains_by_it():
    text = OF_TYPES.replace("bf16[128,256] parameter", "s8[128,256] parameter")
    flops = schedule(text, H100, PhysicalMesh({}, np.zeros(1, int)), PLAIN).flops_by_type
    assert flops == {"s8": 4 * 512 * 256 * 128, "f8e5m2": 2 * 512 * 256 * 128}
    int8, float8 = CHIPS["v6e"].narrow_type_notes(flops)
    assert re.search("67% .* int8, .* 1,836 .* bfloat16, 918", int8)
    assert re.search("33% .* float8, .* not faster .* v6e .*918", float8)
    int8, float8 = CHIPS["tpu7x"].narrow_type_notes(flops)
    assert re.search("int8, .* not faster .* tpu7x", int8)
    assert re.search(r"float8, .* 2,307 .* 1,15[34]", float8)
    assert CHIPS["v6e"].narrow_type_notes({"bf16": 5, "f32": 2}) == []


def test_of_a_stack_only_the_slice_is_read():
    # Read and written: one of four; and the index.
    moved = 4 * (2 * 512 * 256 + 1)
    assert seconds("f", H100) == pytest.approx(moved / H100.hbm_bandwidth)
    # The same beside other instructions: its begin has the cost, its end none.
    assert seconds("begun", H100) == pytest.approx(moved / H100.hbm_bandwidth)
    assert seconds("done", H100) == 0.0


# Two rows of a table of 1,000 are looked up; a new row of a cache is written by a slice and, at a
# place of each row's own, by a scatter; a product reads a weight in HBM and a copy in VMEM, S(1).
DECODING = """HloModule m

%lookup (t: bf16[1000,256], i: s32[2]) -> bf16[2,256] {
  %t = bf16[1000,256]{1,0} parameter(0)
  %i = s32[2]{0} parameter(1)
  ROOT %rows = bf16[2,256]{1,0} gather(%t, %i), offset_dims={1}, slice_sizes={1,256}
}

%write (c: bf16[2,4,64,128], n: bf16[2,4,1,128], p: s32[]) -> bf16[2,4,64,128] {
  %c = bf16[2,4,64,128]{3,2,1,0} parameter(0)
  %n = bf16[2,4,1,128]{3,2,1,0} parameter(1)
  %p = s32[] parameter(2)
  %named = bf16[2,4,64,128]{3,2,1,0} bitcast(%c)
  %new = bf16[2,4,64,128]{3,2,1,0} dynamic-update-slice(%named, %n, %p, %p, %p, %p)
  ROOT %out = bf16[2,4,64,128]{3,2,1,0} bitcast(%new)
}

%copied (c: bf16[2,4,64,128]) -> bf16[2,4,64,128] {
  %c = bf16[2,4,64,128]{3,2,1,0} parameter(0)
  ROOT %copy = bf16[2,4,64,128]{3,2,1,0} copy(%c)
}

%put (c: bf16[2,4,64,128], i: s32[2,2], n: bf16[2,4,128]) -> bf16[2,4,64,128] {
  %c = bf16[2,4,64,128]{3,2,1,0} parameter(0)
  %i = s32[2,2]{1,0} parameter(1)
  %n = bf16[2,4,128]{2,1,0} parameter(2)
  ROOT %s = bf16[2,4,64,128]{3,2,1,0} scatter(%c, %i, %n), update_window_dims={1,2}
}

ENTRY %main (t: bf16[1000,256], i: s32[2], w: bf16[256,512], c: bf16[2,4,64,128]) -> f32[2,512] {
  %t = bf16[1000,256]{1,0} parameter(0)
  %i = s32[2]{0} parameter(1)
  %w = bf16[256,512]{1,0} parameter(2)
  %c = bf16[2,4,64,128]{3,2,1,0} parameter(3)
  %n = bf16[2,4,1,128]{3,2,1,0:T(4,128)S(1)} parameter(4)
  %m = bf16[2,4,128]{2,1,0} parameter(5)
  %p = s32[]{:S(2)} parameter(6)
  %j = s32[2,2]{1,0:S(1)} parameter(7)
  %rows = bf16[2,256]{1,0} fusion(%t, %i), kind=kLoop, calls=%lookup
  %written = bf16[2,4,64,128]{3,2,1,0} fusion(%c, %n, %p), kind=kLoop, calls=%write
  %put_ = bf16[2,4,64,128]{3,2,1,0} fusion(%c, %j, %m), kind=kCustom, calls=%put
  %copy = bf16[256,512]{1,0:T(8,128)S(1)} copy(%w)
  %in_hbm = f32[2,512]{1,0:S(1)} dot(%rows, %w), lhs_contracting_dims={1}
  ROOT %in_vmem = f32[2,512]{1,0} dot(%rows, %copy), lhs_contracting_dims={1}
}
"""


@pytest.mark.parametrize(
    ("name", "moved", "of_hbm"),
    [
        # Two rows, read and written, and their numbers.
        ("rows", 2 * 2 * 2 * 256 + 2 * 4, 2 * 2 * 2 * 256 + 2 * 4),
        # The new row, read (in VMEM) and written, and its place.
        ("written", 2 * 2 * 8 * 128 + 4, 2 * 8 * 128),
        ("put_", 2 * 2 * 8 * 128 + 2 * 2 * 4, 2 * 2 * 8 * 128),
        # The rows, the weight and the result, which is in VMEM.
        ("in_hbm", 2 * 2 * 256 + 2 * 256 * 512 + 4 * 2 * 512, 2 * 2 * 256 + 2 * 256 * 512),
        ("in_vmem", 2 * 2 * 256 + 2 * 256 * 512 + 4 * 2 * 512, 2 * 2 * 256 + 4 * 2 * 512),
    ],
)
@pytest.mark.parametrize(
    "named",
    [
        "bitcast(%c)",
        # On TPU7x the rows of a tile are numbered anew in place.
        "fusion(%c), kind=kLoop, output_to_operand_aliasing={{}: (0, {})}, calls=%copied",
    ],
)
def test_decoding_moves_rows_of_tables_and_caches_and_whole_weights(name, moved, of_hbm, named):
    program = parse(DECODING.replace("bitcast(%c)", named))
    main = program.computations[program.entry]
    assert bytes_moved(main[name], main, program) == moved
    assert bytes_moved(main[name], main, program, bytes_in_hbm) == of_hbm


def test_a_kernels_flops_are_those_of_the_blocks_it_computes():
    # Its text stands on three lines. Four matmuls of dk and dv, a quarter of the blocks.
    by_hand = 0.25 * 4 * 2 * (2 * 4 * 1024 * 128) * 2048
    assert kernel_flops(MAIN["dkv"], MAIN) == pytest.approx(by_hand)
    assert seconds("dkv", V5E) == pytest.approx(by_hand / V5E.peak())
    assert kernel_flops(MAIN["dkv"], MAIN, of_model=True) == pytest.approx(by_hand / 2)
    assert kernel_flops(MAIN["d"], MAIN) == 0
    # tokamax's gives dq too: five, of which the model has four.
    assert kernel_flops(MAIN["dq_too"], MAIN) == pytest.approx(by_hand * 5 / 4)
    assert kernel_flops(MAIN["dq_too"], MAIN, of_model=True) == pytest.approx(by_hand)


def test_a_grouped_matmuls_flops_are_those_of_the_rows_that_are_someones():
    # 512 of the 640 rows, whatever the experts are, forward and for the experts' gradients.
    for name in ("gmm.3", "tgmm.1", "gmm_megablox_transpose_rhs.2", "tgmm_megablox.1"):
        assert kernel_flops(MAIN[name], MAIN) == 2 * 512 * 128 * 256
        assert kernel_flops(MAIN[name], MAIN, of_model=True) == 2 * 512 * 128 * 256


def grouped(num_rows, experts, K, N, share=1.0):
    """Returns a program with both kernels of megablox: of rows [R, K], and of their gradient."""
    numbers = dict(R=num_rows, L=experts, K=K, N=N)
    text = """HloModule m

ENTRY %main (x: bf16[R,K], w: bf16[L,K,N], g: bf16[R,N]) -> bf16[R,N] {
  %x = bf16[R,K] parameter(0)
  %w = bf16[L,K,N] parameter(1)
  %g = bf16[R,N] parameter(2)
  %tgmm.1 = bf16[L,K,N] custom-call(%x, %g), custom_call_target="tpu_custom_call"SHARE
  ROOT %gmm.2 = bf16[R,N] custom-call(%x, %w), custom_call_target="tpu_custom_call"SHARE
}
"""
    for name, number in numbers.items():
        text = re.sub(rf"(?<=[\[,]){name}(?=[\],])", str(number), text)
    program = parse(text.replace("SHARE", f', share_of_blocks="{share}"'))
    return program, program.computations[program.entry]


@pytest.mark.parametrize(
    ("num_rows", "experts", "K", "N", "share", "count", "tile"),
    [
        # 8 tiles of 512 rows, of which 15 are shared by two experts, and 2 x 3 of the others.
        (4096, 16, 2048, 3072, 1.0, 23 * 2 * 3, (512, 1024, 1024)),
        # Half of the rows are someone's.
        (4096, 16, 2048, 3072, 0.5, 23 * 3, (512, 1024, 1024)),
        # The second tile of 1,408 is multiplied whole.
        (4096, 1, 1408, 1024, 1.0, 8 * 2, (512, 1024, 1024)),
        (100, 1, 512, 256, 1.0, 1, (112, 512, 256)),
    ],
)
def test_a_grouped_matmul_takes_the_time_of_its_whole_tiles(
    num_rows, experts, K, N, share, count, tile
):
    program, main = grouped(num_rows, experts, K, N, share)
    rows, inputs, outputs = tile
    fast = dataclasses.replace(V5E, hbm_bandwidth=1e30)
    for name in ("gmm.2", "tgmm.1"):
        multiplied = count * 2 * math.prod(tile) / (V5E.peak() * PLAIN.grouped)
        actual = compute_seconds(main[name], main, program, fast, PLAIN)
        assert actual == pytest.approx(multiplied)
    # Where the memory is slow: rows, and weights unless they stay; rows and their gradient.
    slow = dataclasses.replace(V5E, hbm_bandwidth=1.0)
    weights = inputs * outputs if inputs < K else 0
    for name, other in (("gmm.2", weights), ("tgmm.1", rows * outputs)):
        actual = compute_seconds(main[name], main, program, slow, PLAIN)
        assert actual == pytest.approx(count * 2 * (rows * inputs + other))


def test_cudnns_flops_are_those_of_the_pairs_in_its_mask():
    # 2 x 128 of each row, head and pair in a matmul: of two forward, and of five or four backward.
    one = 2 * 2 * 4 * 128
    assert kernel_flops(MAIN["causal"], MAIN) == 2 * one * 1000 * 1001 // 2
    assert kernel_flops(MAIN["full"], MAIN) == 2 * one * 1000 * 700
    in_window = sum(range(1, 11)) + 990 * 10
    assert kernel_flops(MAIN["windows"], MAIN) == 5 * one * in_window
    assert kernel_flops(MAIN["windows"], MAIN, of_model=True) == 4 * one * in_window
    assert seconds("causal", H100) == pytest.approx(one * 1000 * 1001 / H100.peak())


@pytest.mark.parametrize(
    "mask",
    [
        AttentionMask(),
        AttentionMask(right_context=0),
        AttentionMask(left_context=700, right_context=0),
        AttentionMask(left_context=300, right_context=200),
    ],
)
@pytest.mark.parametrize("lengths", [(2048, 2048), (1024, 1536), (384, 384)])
def test_the_share_of_blocks_that_splash_computes(mask, lengths):
    seen = mask.visible(*lengths)
    seen = np.ones((1, *lengths), bool) if seen is None else np.asarray(seen)
    row = JaxSplash(lengths, 1, mask, LogitOptions(), interpret=True)
    block_q, block_kv = row.block_sizes
    blocks = seen[0].reshape(lengths[0] // block_q, block_q, lengths[1] // block_kv, block_kv)
    assert row.share_of_blocks() == pytest.approx(blocks.any((1, 3)).mean())


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        ("all-gather", 7 * 1024),
        ("all-reduce", 2 * 7 / 8 * 1024),
        ("reduce-scatter", 7 / 8 * 1024),
        ("all-to-all", 7 / 8 * 1024),
        ("collective-permute", 1024),
    ],
)
def test_what_a_ring_sends(kind, sent):
    spec = CollectiveSpec(kind=kind, operand_bytes=1024, group_size=8)
    assert spec.sent_bytes == sent
    assert collective_seconds(spec, V5E, PLAIN) == pytest.approx(sent / (2 * V5E.link_bandwidth))


def test_devices_of_a_chip_send_once_what_all_devices_get():
    def seconds(kind, per_chip):
        spec = CollectiveSpec(
            kind=kind, operand_bytes=1024, group_size=8, devices_per_chip=per_chip
        )
        return collective_seconds(spec, V5E, PLAIN)

    for kind in ("all-gather", "all-reduce", "reduce-scatter"):
        assert seconds(kind, 2) == pytest.approx(seconds(kind, 1) / 2)
    for kind in ("all-to-all", "collective-permute"):  # Each device's bytes are for one other.
        assert seconds(kind, 2) == seconds(kind, 1)


def test_lines_hops_slices_and_nvlink():
    ring = CollectiveSpec(kind="all-gather", operand_bytes=2**20, group_size=8)

    def seconds(chip, efficiencies=PLAIN, **changes):
        return collective_seconds(dataclasses.replace(ring, **changes), chip, efficiencies)

    assert seconds(V5E, is_ring=False) == pytest.approx(2 * seconds(V5E))
    late = dataclasses.replace(PLAIN, hop_seconds=1.0)
    assert seconds(V5E, late) == pytest.approx(4.0, abs=1e-3)  # Both ways round.
    sent = ring.sent_bytes
    assert seconds(V5E, crosses=True) == pytest.approx(sent / V5E.network_bandwidth)
    assert seconds(H100) == pytest.approx(sent / H100.link_bandwidth)
    assert seconds(V5E, kind="all-reduce", group_size=1) == 0.0
