"""The schedule of a TPU's program, against sums by hand."""

import dataclasses
import types

import numpy as np
import pytest

from praxis_tools.plan.chips import CHIPS
from praxis_tools.plan.costs import FITTED
from praxis_tools.plan.predict import predicted_fields
from praxis_tools.plan.schedule.schedule import schedule
from praxis_tools.plan.topology import PhysicalMesh, Topology

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


CHIP = CHIPS["v5e"]
MESH = PhysicalMesh({"data": 8}, np.zeros(8, int))


def seconds_of(wire_bytes, links, hops, efficiencies):
    return (
        wire_bytes / (links * CHIP.link_bandwidth * efficiencies.link)
        + hops * efficiencies.hop_seconds
    )


@pytest.mark.parametrize("hop_seconds", [1e-9, 1e-3])
def test_a_program_takes_what_its_parts_do(hop_seconds):
    fitted = dataclasses.replace(FITTED, hop_seconds=hop_seconds)
    actual = schedule(TEXT, CHIP, MESH, fitted)
    computed = 1500 / CHIP.clock / fitted.cycles
    # Of the permute only what lasts longer than the computation is waited for.
    permute = seconds_of(4096, 1, 1, fitted)
    gather = seconds_of(7 * 1024, 2, 4, fitted)
    assert (permute > computed) == (hop_seconds == 1e-3)
    assert actual.memory_seconds == pytest.approx(3 * computed + 600 / CHIP.clock / fitted.cycles)
    assert actual.seconds == pytest.approx(
        3 * max(permute, computed) + gather + 600 / CHIP.clock / fitted.cycles
    )
    by_kind = {collective.kind: collective for collective in actual.collectives.values()}
    assert by_kind["collective-permute"].exposed_seconds == pytest.approx(
        3 * max(permute - computed, 0)
    )
    assert by_kind["collective-permute"].wire_bytes == 3 * 4096
    assert by_kind["all-gather"].wire_bytes == 7 * 1024
    assert by_kind["all-gather"].bytes == 8 * 1024
    assert by_kind["all-gather"].axes == ("data",)
    assert by_kind["collective-permute"].instructions == {"start", "done"}
    branch = 600 / CHIP.clock / fitted.cycles
    assert actual.instruction_seconds == pytest.approx({"y": 3 * computed, "b": branch})
    assert actual.exposed_seconds == pytest.approx(3 * max(permute - computed, 0) + gather)


def test_a_permute_over_both_links_takes_half_as_long():
    fitted = dataclasses.replace(FITTED, hop_seconds=0.0)
    item, both = (
        next(
            c
            for c in schedule(TEXT, CHIP, MESH, fitted, both_links=both).collectives.values()
            if c.kind == "collective-permute"
        ).seconds
        for both in (False, True)
    )
    assert item == pytest.approx(2 * both)


# Two fusions share one all-gather of 1024 bytes per device; an instruction runs between them.
FUSED = """HloModule step, num_partitions=8

%first (p: f32[256]) -> f32[2048] {
  %p = f32[256] parameter(0)
  ROOT %g = f32[2048] all-gather(%p), replica_groups=[1,8]<=[8], CHAIN
}

%last (p: f32[256]) -> f32[2048] {
  %p = f32[256] parameter(0)
  ROOT %g = f32[2048] all-gather(%p), replica_groups=[1,8]<=[8], CHAIN
}

ENTRY %main (p: f32[256]) -> f32[2048] {
  %p = f32[256] parameter(0)
  %start = f32[2048] fusion(%p), calls=%first, backend_config={"estimated_cycles":"300"}
  %between = f32[256] negate(%p), backend_config={"estimated_cycles":"900"}
  %end = f32[2048] fusion(%start), calls=%last, backend_config={"estimated_cycles":"300"}
  ROOT %after = f32[2048] negate(%end), backend_config={"estimated_cycles":"600"}
}
""".replace("CHAIN", 'dimensions={0}, frontend_attributes={chain_id="7"}')


@pytest.mark.parametrize("hop_seconds", [1e-9, 1e-3])
def test_a_collective_spread_over_fusions_ends_with_the_last_of_them(hop_seconds):
    fitted = dataclasses.replace(FITTED, hop_seconds=hop_seconds)
    actual = schedule(FUSED, CHIP, MESH, fitted)
    cycle = 1 / CHIP.clock / fitted.cycles
    gather = seconds_of(7 * 1024, 2, 4, fitted)
    assert (gather > 1500 * cycle) == (hop_seconds == 1e-3)
    assert actual.seconds == pytest.approx(max(gather, 1500 * cycle) + 600 * cycle)
    (collective,) = actual.collectives.values()
    assert collective.exposed_seconds == pytest.approx(max(gather - 1500 * cycle, 0))
    assert collective.wire_bytes == 7 * 1024


# A weight of 1,638,400 bytes, 2 us of a v5e's bandwidth, is copied into VMEM while an instruction
# runs for 1 us and moves 409,600 bytes of its own; a second one behind it, while a sum is on the
# wire. The row of a scatter, 512 bytes, takes as long as the smallest instruction.
COPIES = """HloModule step, num_partitions=8

%put (c: f32[64,128], i: s32[1], n: f32[1,128]) -> f32[64,128] {
  %c = f32[64,128]{1,0} parameter(0)
  %i = s32[1]{0} parameter(1)
  %n = f32[1,128]{1,0} parameter(2)
  ROOT %s = f32[64,128]{1,0} scatter(%c, %i, %n), update_window_dims={1}
}

ENTRY %main (w: f32[409600], v: f32[102400], c: f32[64,128], i: s32[1]) -> f32[64,128] {
  %w = f32[409600]{0} parameter(0)
  %v = f32[102400]{0} parameter(1)
  %c = f32[64,128]{1,0} parameter(2)
  %i = s32[1]{0} parameter(3)
  %n = f32[1,128]{1,0:S(1)} parameter(4)
  %x = f32[1024]{0:S(1)} parameter(5)
  %first = (f32[409600]{0:T(1024)S(1)}, f32[409600]{0:T(1024)}, u32[]{:S(2)}) copy-start(%w)
  %next = ((f32[409600]{0}), f32[204800]{0:S(1)}, s32[]{:S(2)}) slice-start(%w), slice={[0:204800]}
  %y = f32[1024]{0:S(1)} reduce(%v), backend_config={"estimated_cycles":"1500"}
  %here = f32[409600]{0:T(1024)S(1)} copy-done(%first)
  %sum = f32[1024]{0:S(1)} all-reduce(%x), replica_groups=[1,8]<=[8]
  %there = f32[204800]{0:S(1)} slice-done(%next)
  ROOT %put_ = f32[64,128]{1,0} fusion(%c, %i, %n), kind=kCustom, calls=%put
}
"""


def test_copies_share_the_memorys_bandwidth_with_instructions_and_wait_for_it():
    exact = dataclasses.replace(FITTED, cycles=1.0, hop_seconds=1e-7)
    chip = dataclasses.replace(CHIP, hbm_bandwidth=819.2e9)
    actual = schedule(COPIES, chip, MESH, exact)
    # The first copy gets 409,600 bytes beside the instruction, which takes as many.
    first = (1_638_400 - 409_600) / 819.2e9
    wire = seconds_of(2 * 7 / 8 * 4096, 2, 4, exact)
    second = 819_200 / 819.2e9 - wire
    assert actual.instruction_seconds == pytest.approx(
        {"y": 1e-6, "here": first, "there": second, "put_": 1830 / chip.clock}
    )
    assert actual.seconds == pytest.approx(1e-6 + first + wire + second + 1830 / chip.clock)
    # What all of it moves takes no less than at the whole bandwidth.
    assert actual.seconds > (1_638_400 + 819_200 + 409_600) / 819.2e9


def test_a_turn_of_a_loop_alone_and_all_else():
    whole = schedule(TEXT, CHIP, MESH).seconds
    turn = schedule(TEXT, CHIP, MESH, loop_body="body").seconds
    rest = schedule(TEXT, CHIP, MESH, skipped_loop="body").seconds
    assert whole == pytest.approx(3 * turn + rest)
    assert min(turn, rest) > 0


# 25,000 bytes are sent to the other slice; a gather within the slice goes on beside that.
TWO_SLICES = """HloModule step, num_partitions=16

ENTRY %main (p: f32[256]) -> f32[2048] {
  %p = f32[256] parameter(0)
  %zero = f32[] constant(0)
  %x = f32[6250] broadcast(%zero), metadata={op_name="jit(f)/transpose(jvp(encoder))/atten/dot"}
  %copied = f32[6250] copy(%x)
  %after = token[] after-all()
  %send = (f32[6250], u32[], token[]) send(%copied, %after), channel_id=1, \
frontend_attributes={_xla_megascale_transfer_type="ALL_REDUCE"}
  %whole = f32[2048] all-gather(%p), replica_groups=[2,8]<=[16], dimensions={0}
  %used = f32[2048] negate(%whole), metadata={op_name="jit(f)/jvp(encoder)/ffn/dot"}
  %sent = token[] send-done(%send)
  ROOT %end = f32[2048] copy(%used)
}
"""


def test_the_network_between_slices_leaves_the_links_within_one_free():
    mesh = PhysicalMesh({"replica": 2, "data": 8}, np.repeat([0, 1], 8))
    actual = schedule(TWO_SLICES, CHIP, mesh, FITTED)
    send = FITTED.network_seconds + 25_000 / (CHIP.network_bandwidth * FITTED.network)
    gather = seconds_of(7 * 1024, 2, 4, FITTED)
    by_kind = {collective.kind: collective for collective in actual.collectives.values()}
    assert by_kind["all-gather"].exposed_seconds == pytest.approx(gather)
    assert by_kind["all-reduce"].exposed_seconds == pytest.approx(send - gather)
    assert actual.seconds == pytest.approx(send)
    # XLA gives no names: the gather's layer is that of what uses it, the sum's of what it sums.
    assert by_kind["all-gather"].layer == "encoder/ffn"
    assert by_kind["all-reduce"].layer == "gradient of encoder/atten"
    assert by_kind["all-reduce"].axes == ("replica",)


def test_a_step_grows_each_time_the_slices_double():
    mesh = PhysicalMesh({"data": 8}, np.zeros(8, int))
    devices = [types.SimpleNamespace(platform="tpu")] * 32
    item, four = (
        predicted_fields(TEXT, Topology("v5e:2x4", CHIP, (2, 4), slices, devices), mesh, 1, FITTED)
        for slices in (1, 4)
    )
    waits = 1 + 2 * FITTED.waiting
    for name in ("step_seconds", "step_seconds_low", "step_seconds_high"):
        assert four[name] == pytest.approx(item[name] * waits)


@pytest.mark.parametrize(
    ("algorithm", "dims"),
    [
        ('backend_config={"collective_algorithm_config":{"emitter":"3DAllGatherOnMajorDim"}}', 3),
        ('backend_config={"collective_algorithm_config":{"emitter":"2DAllReduce"}}', 2),
        # Two of the torus's three dims.
        ('backend_config={"emitter":"StrategySubgroupND{num_dims:3 active_dims:101}"}', 2),
        ('backend_config={"emitter":"StrategyND{num_dims:3}"}', 3),
        ("dimensions={0}", 1),
    ],
)
def test_a_collective_over_more_torus_dims_has_more_links(algorithm, dims):
    chip = CHIPS["v5p"]
    text = TEXT.replace("dimensions={0}", algorithm)
    efficiencies = dataclasses.replace(FITTED, hop_seconds=0.0)
    (gather,) = (
        item
        for item in schedule(text, chip, MESH, efficiencies).collectives.values()
        if item.kind == "all-gather"
    )
    expected = 7 * 1024 / (2 * dims * chip.link_bandwidth * efficiencies.link)
    assert gather.seconds == pytest.approx(expected)


@pytest.mark.parametrize(
    ("dims", "devices", "expected"),
    [
        ((4, 4, 4), [(0, 0, z) for z in range(4)], True),
        ((2, 4, 4), [(0, 0, z) for z in range(4)], False),  # Within a cube no dim is a ring.
        ((4, 4, 8), [(0, 0, z) for z in range(4)], False),  # Half of a ring.
        ((2, 4, 4), [(0, y, z) for y in range(4) for z in range(4)], True),
    ],
)
def test_devices_along_a_dim_are_a_ring_where_it_wraps(dims, devices, expected):
    count = len(devices)
    mesh = PhysicalMesh(
        {"data": count}, np.zeros(count, int), np.array(devices), dims, CHIPS["v5p"].wraps(dims)
    )
    assert mesh.is_ring(np.arange(count)[None]) is expected


# A loop of 3 turns that writes a layer of 4096 bytes to the host beside 1,500 cycles, of which a
# matmul's worth is left to wait for; then a slice from there, and all of it, that none hides.
ON_HOST = """HloModule step, num_partitions=8

%body (s: (s32[], f32[1024], f32[3,1024])) -> (s32[], f32[1024], f32[3,1024]) {
  %s = (s32[], f32[1024], HOST) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[1024]{0} get-tuple-element(%s), index=1
  %kept = HOST get-tuple-element(%s), index=2
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %row = f32[1,1024]{1,0} bitcast(%x)
  %send = ((HOST, f32[1,1024]{1,0}), HOST, u32[]) dynamic-update-slice-start(%kept, %row, %i, %i)
  %y = f32[1024]{0} negate(%x), backend_config={"estimated_cycles":"1500"}
  %sent = HOST dynamic-update-slice-done(%send)
  ROOT %out = (s32[], f32[1024], HOST) tuple(%next, %y, %sent)
}

%cond (s: (s32[], f32[1024], f32[3,1024])) -> pred[] {
  %s = (s32[], f32[1024], HOST) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %three = s32[] constant(3)
  ROOT %less = pred[] compare(%i, %three), direction=LT
}

ENTRY %main (x: f32[1024], h: f32[3,1024]) -> f32[1024] {
  %x = f32[1024]{0} parameter(0)
  %h = HOST parameter(1)
  %zero = s32[] constant(0)
  %init = (s32[], f32[1024], HOST) tuple(%zero, %x, %h)
  %loop = (s32[], f32[1024], HOST) while(%init), condition=%cond, body=%body
  %kept = HOST get-tuple-element(%loop), index=2
  %fetch = ((HOST, s32[], s32[]), f32[1,1024]{1,0}, u32[]) dynamic-slice-start(%kept, %zero, %zero)
  %fetched = f32[1,1024]{1,0:T(8,128)} dynamic-slice-done(%fetch)
  %near = (f32[1024]{0:S(1)}, f32[1024]{0}, u32[]{:S(2)}) copy-start(%x)
  %in_vmem = f32[1024]{0:S(1)} copy-done(%near)
  %start = (f32[3,1024]{1,0:T(8,128)}, HOST, u32[]{:S(2)}) copy-start(%kept)
  ROOT %done = f32[3,1024]{1,0:T(8,128)} copy-done(%start)
}
""".replace("HOST", "f32[3,1024]{1,0:T(8,128)S(5)}")


def test_copies_to_and_from_the_host_take_the_link_and_are_hidden_or_not():
    chip = dataclasses.replace(CHIP, host_bandwidth=1e9)
    actual = schedule(ON_HOST, chip, MESH)
    computed, layer = 1500 / CHIP.clock / FITTED.cycles, 4096 / 1e9
    assert layer > computed
    by_kind = {entry.kind: entry for entry in actual.host_copies.values()}
    sent, fetched = by_kind["copy to the host"], by_kind["copy from the host"]
    assert (sent.count, sent.bytes) == (3, 3 * 4096)
    assert (fetched.count, fetched.bytes) == (2, 4 * 4096)  # A layer, and all three.
    assert sent.exposed_seconds == pytest.approx(3 * (layer - computed))
    assert fetched.seconds == fetched.exposed_seconds == pytest.approx(4 * layer)
    assert actual.host_copy_seconds == pytest.approx(7 * layer)
    assert actual.exposed_host_copy_seconds == pytest.approx(7 * layer - 3 * computed)
    # A copy within the device is none of these.
    near = 2 * 4096 / CHIP.hbm_bandwidth
    assert actual.seconds == pytest.approx(7 * layer, abs=2 * near)
    fast = schedule(ON_HOST, dataclasses.replace(chip, host_bandwidth=1e12), MESH)
    assert fast.exposed_host_copy_seconds < actual.exposed_host_copy_seconds / 100


def test_a_copy_to_the_host_in_an_asynchronous_call_counts_as_one_by_itself():
    taken = """
%taken (h: f32[3,1024], i: s32[], j: s32[]) -> f32[1,1024] {
  %h = f32[3,1024]{1,0:T(8,128)S(5)} parameter(0)
  %i = s32[] parameter(1)
  %j = s32[] parameter(2)
  ROOT %row = f32[1,1024]{1,0} dynamic-slice(%h, %i, %j), dynamic_slice_sizes={1,1024}
}

ENTRY"""
    called = (
        ON_HOST.replace("\nENTRY", taken)
        .replace(
            "dynamic-slice-start(%kept, %zero, %zero)",
            "async-start(%kept, %zero, %zero), calls=%taken",
        )
        .replace("dynamic-slice-done(%fetch)", "async-done(%fetch)")
    )
    chip = dataclasses.replace(CHIP, host_bandwidth=1e9)
    actual, expected = schedule(called, chip, MESH), schedule(ON_HOST, chip, MESH)
    assert "calls=%taken" in called and actual.host_copy_seconds == expected.host_copy_seconds
    assert actual.seconds == expected.seconds


# On a SparseCore of a TPU7x, as its compiler writes it: the core is started, told what to send, and
# waited for. Beside it an instruction runs for 1,100 cycles.
ON_SPARSECORE = """HloModule step, num_partitions=8

%on_core (p: f32[1024]) -> f32[128] {
  %p = f32[1024]{0} parameter(0)
  ROOT %sum = f32[128]{0} reduce-scatter(%p), replica_groups=[1,8]<=[8], RINGS
}

%begun (p: f32[1024]) -> f32[128] {
  %p = f32[1024]{0} parameter(0)
  ROOT %call = f32[128]{0} custom-call(%p), custom_call_target="x", called_computations={%on_core}
}

ENTRY %main (x: f32[1024], y: f32[8]) -> f32[128] {
  %x = f32[1024]{0} parameter(0)
  %y = f32[8]{0} parameter(1)
  %start = ((), (), (s32[3]{0})) async-start(), async_execution_thread="sparsecore", calls=%begun
  %told = ((f32[1024]{0}), f32[128]{0}, (s32[3]{0})) async-update(%start, %x)
  %z = f32[8]{0} negate(%y), backend_config={"estimated_cycles":"1100"}
  ROOT %done = f32[128]{0} async-done(%told)
}
"""


@pytest.mark.parametrize(
    ("rings", "dim", "links"), [(2, "X_TORUS", 2), (6, "X_TORUS", 6), (4, "X_MESH", 2)]
)
@pytest.mark.parametrize("per_chip", [1, 2])
def test_a_collective_on_a_sparsecore_runs_beside_instructions_over_its_rings(
    rings, dim, links, per_chip
):
    """Two devices of a chip have its links together."""
    chip, fitted = CHIPS["tpu7x"], dataclasses.replace(FITTED, hop_seconds=1e-3)
    ring = f'{{"phase_rings":[{{"ring_dim":"ICI_RING_DIM_{dim}"}}]}}'
    config = f'backend_config={{"color_strategies":[{",".join([ring] * rings)}]}}'
    coords = np.stack([np.arange(8) // per_chip, np.zeros(8, int), np.zeros(8, int)], axis=1)
    mesh = PhysicalMesh({"data": 8}, np.zeros(8, int), coords, (8 // per_chip, 1, 1), (True,) * 3)
    actual = schedule(ON_SPARSECORE.replace("RINGS", config), chip, mesh, fitted)
    bandwidth = links * per_chip * chip.link_bandwidth * fitted.link
    on_wire = 7 * 512 / bandwidth + 4 * fitted.hop_seconds
    (item,) = actual.collectives.values()
    assert (item.kind, item.count) == ("reduce-scatter", 1)
    assert item.seconds == pytest.approx(on_wire)
    assert item.exposed_seconds == pytest.approx(on_wire - 1100 / chip.clock / fitted.cycles)
