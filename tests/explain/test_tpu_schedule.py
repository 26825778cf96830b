"""The schedule of benchmarks/tpu_schedule.py, against sums by hand."""

import pytest

from benchmarks.tpu_schedule import CHIPS, schedule

# A loop of 3 turns: 1,500 cycles beside a permute of 4096 bytes; then an all-gather of 8 devices
# of 1024 bytes each, awaited; and a condition of 300 or 600 cycles.
TEXT = """HloModule step, num_partitions=8

%body (s: (s32[], f32[1024])) -> (s32[], f32[1024]) {
  %s = (s32[], f32[1024]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[1024] get-tuple-element(%s), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %start = (f32[1024], f32[1024]) collective-permute-start(%x), source_target_pairs={{0,1}}
  %y = f32[1024] negate(%x), backend_config={"estimated_cycles":"1500"}
  %done = f32[1024] collective-permute-done(%start)
  ROOT %out = (s32[], f32[1024]) tuple(%next, %done)
}

%cond (s: (s32[], f32[1024])) -> pred[] {
  %s = (s32[], f32[1024]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %three = s32[] constant(3)
  ROOT %less = pred[] compare(%i, %three), direction=LT
}

%cheap (a: f32[256]) -> f32[256] {
  %a = f32[256] parameter(0)
  ROOT %b = f32[256] negate(%a), backend_config={"estimated_cycles":"300"}
}

%dear (a: f32[256]) -> f32[256] {
  %a = f32[256] parameter(0)
  ROOT %b = f32[256] negate(%a), backend_config={"estimated_cycles":"600"}
}

ENTRY %main (x: f32[1024], p: f32[256], q: pred[]) -> f32[256] {
  %x = f32[1024] parameter(0)
  %p = f32[256] parameter(1)
  %q = pred[] parameter(2)
  %zero = s32[] constant(0)
  %init = (s32[], f32[1024]) tuple(%zero, %x)
  %loop = (s32[], f32[1024]) while(%init), condition=%cond, body=%body
  %whole = f32[2048] all-gather(%p), replica_groups=[1,8]<=[8], dimensions={0}
  ROOT %end = f32[256] conditional(%q, %p, %p), true_computation=%cheap, false_computation=%dear
}
"""


@pytest.mark.parametrize("permute_bandwidth", [1.0, 0.001])
def test_a_program_takes_what_its_parts_do(permute_bandwidth):
    clock, bandwidth = CHIPS["v5e"]
    found = schedule(TEXT, "v5e", permute_bandwidth)
    assert found.cycles == 3 * 1500 + 600
    assert found.wire_bytes == 3 * 4096 + 7 * 1024
    # Of the permute only what lasts longer than the computation is waited for.
    permute, computed = 4096 / bandwidth / permute_bandwidth, 1500 / clock
    gather = 7 * 1024 / bandwidth
    assert (permute > computed) == (permute_bandwidth < 1)
    assert found.seconds == pytest.approx(3 * max(permute, computed) + gather + 600 / clock)
    assert found.waits == pytest.approx(3 * max(permute - computed, 0) + gather)
