"""The kernels of CUDA graphs as instructions: a step that ran on an H200, and traces by hand."""

import gzip
import shutil
from pathlib import Path

import pytest

from praxis_tools.explain.hlo_text import parse
from praxis_tools.profile.graphs import Schedule
from praxis_tools.profile.measured import NOT_NAMED, measure
from praxis_tools.profile.trace import UNNAMED, OpTime, read_trace
from praxis_tools.utilization.utilization_hook import flops_of_program
from tests.support.traces import write_trace

# Two steps of jax 0.11.2, without source lines and without what this package does not read.
H200 = Path(__file__).parent / "h200"
TRACE = "plugins/profile/step_40/process_0.xplane.pb"
LAYER = "transformer/blocks/ff_layer/ffn_layer1/linear"


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("h200")
    (folder / TRACE).parent.mkdir(parents=True)
    (folder / TRACE).write_bytes(gzip.decompress((H200 / "process_0.xplane.pb.gz").read_bytes()))
    text = gzip.decompress((H200 / "train_step.hlo.txt.gz").read_bytes())
    (folder / "train_step.hlo.txt").write_bytes(text)
    shutil.copy(H200 / "profile.json", folder)
    return measure(folder)


def test_all_time_of_a_step_on_an_h200_is_in_its_layers(measured):
    assert NOT_NAMED not in measured.layers and not measured.collectives
    # 1,878 kernels: the sum of their durations, by jax.profiler.ProfileData.
    total = sum(row.seconds for row in measured.layers.values())
    assert total == pytest.approx(192.749e-3 / 2, rel=1e-4)
    # 10.3 steps per second were printed while it trained.
    assert measured.step_seconds == pytest.approx(1 / 10.3, rel=0.005)
    assert measured.idle_seconds == pytest.approx(measured.step_seconds - total, abs=0.2e-3)


def test_layers_on_an_h200_have_the_kernels_that_were_counted_by_hand(measured):
    # Of both steps, 8 layers each: the cast of the weights, the matmul, and memsets before it.
    forward = measured.layers[LAYER]
    assert forward.seconds * 2e3 == pytest.approx(0.406400 + 11.259153 + 0.0125, abs=0.003)
    assert forward.count == 16
    # Rotations of the query are "self_attention/mul"; cuDNN's kernel; each in 8 layers.
    attention = measured.layers["transformer/blocks/self_attention"]
    assert attention.seconds * 2e3 == pytest.approx(0.507969 + 4.723115 + 0.012, abs=0.003)
    assert attention.count == 16
    # One kernel casts the weights of query, key, value and post; its place tells whose they are.
    casts_and_matmuls = sum(
        measured.layers[f"transformer/blocks/self_attention/{name}"].seconds * 2e3
        for name in ("query", "key", "value", "post")
    )
    assert casts_and_matmuls == pytest.approx(0.567453 + 9.003895 + 3.360815 + 0.05, abs=0.01)


def test_flops_of_that_step_are_those_counted_by_hand(measured):
    text = gzip.decompress((H200 / "train_step.hlo.txt.gz").read_bytes()).decode()
    tokens, block, up = 8 * 2048, 4 * 2048**2, 2048 * 8192
    weights = 8 * (block + 2 * up) + 2048 * 61
    again = 2 * tokens * 8 * (block + up)  # Of the second matmul of a block nothing is needed.
    # 8 layers, rows of 8, 16 heads of 128, causal.
    attention = 2 * 8 * 8 * 16 * 128 * (2048 * 2049 // 2)
    actual = flops_of_program(text)
    assert actual.useful_kernels == (2 + 4) * attention
    assert actual.flops == 6 * tokens * weights + again + (2 + 2 + 5) * attention
    # The input of 8 blocks is kept: zeroed at first, read, and written beside other instructions.
    kept = 8 * 2 * tokens * 2048
    assert measured.layers["transformer"].predicted == pytest.approx(3 * kept / 4.8e12, rel=0.01)


# In this order: a cast of q, one of k, the products, a copy, attention, a sum over devices.
TEXT = """HloModule jit_step, is_scheduled=true

%cast (a: f32[8]) -> bf16[8] {
  %a = f32[8] parameter(0)
  ROOT %b = bf16[8] convert(%a)
}

ENTRY %main (p: f32[8]) -> bf16[8] {
  %p = f32[8] parameter(0)
  %cast_fusion.3 = bf16[8] fusion(%p), kind=kLoop, calls=%cast, metadata={deduplicated_name="cast_fusion.2"}
  %cast_fusion.2 = bf16[8] fusion(%p), kind=kLoop, calls=%cast, metadata={deduplicated_name="cast_fusion.2"}
  %custom-call.1 = bf16[8] custom-call(%cast_fusion.3), custom_call_target="__cublas$lt$matmul"
  %custom-call.2 = bf16[8] custom-call(%cast_fusion.2), custom_call_target="__cublas$lt$matmul"
  %copy.4 = bf16[8] copy(%custom-call.1)
  %attend.1 = bf16[8] custom-call(%copy.4), custom_call_target="__cudnn$fmhaSoftmaxBackward"
  %add_fusion = bf16[8] fusion(%attend.1), kind=kLoop, calls=%cast
  ROOT %all-reduce.1 = bf16[8] all-reduce(%add_fusion), to_apply=%cast
}
"""  # noqa: E501


@pytest.mark.parametrize(
    ("kernels", "expected"),
    [
        # Two fusions run one kernel; a product in two parts after a memset.
        (
            "cast_fusion_3 cast_fusion_3 Memset nvjet_a splitKreduce_kernel Memset nvjet_b",
            "cast_fusion.3 cast_fusion.2 custom-call.1 custom-call.1 custom-call.1 custom-call.2 "
            "custom-call.2",
        ),
        # A graph from the middle; three kernels of a call.
        (
            "memcpy128 cudnn::dot cudnn::bprop cudnn::cast add_fusion ncclDevKernel_AllReduce",
            "copy.4 attend.1 attend.1 attend.1 add_fusion all-reduce.1",
        ),
        # Nothing calls cuDNN so early, and a fusion's own name tells it anywhere.
        (
            "add_fusion__1 cast_fusion_3 cudnn::bprop cast_fusion_3 nvjet_a nvjet_b memcpy32_post",
            "add_fusion cast_fusion.3 - cast_fusion.2 custom-call.1 custom-call.2 copy.4",
        ),
        ("cudnn::a ncclDevKernel", "attend.1 all-reduce.1"),
    ],
)
def test_kernels_belong_to_instructions_by_name_and_by_order(kernels, expected):
    actual = Schedule(parse(TEXT)).instructions_of(tuple(kernels.split()))
    assert " ".join(name or "-" for name in actual) == expected


def test_a_graphs_kernels_count_once_and_those_without_an_instruction_are_shown(tmp_path):
    def kernel(name, start, duration, launch, op="command_buffer_7"):
        stats = {"hlo_op": op, "hlo_module": "jit_step", "correlation_id": launch}
        return name, start, duration, stats

    lines = {
        "Stream #13(Compute)": [
            # The order of events in a file is not that of time.
            kernel("nvjet_a", 20, 5, 1),
            kernel("cast_fusion_3", 10, 2, 1),
            kernel("cast_fusion_3", 13, 3, 1),
            kernel("cudnn::bprop", 17, 1, 1),
            kernel("Memset", 40, 1, 2, "attend.1"),
            kernel("cudnn::a", 42, 4, 3, "attend.1"),
        ],
        "Stream #14(MemcpyD2H)": [("MemcpyD2H", 0, 9, {})],
        "XLA Ops": [kernel("command_buffer_7", 10, 15, 1)],
    }
    file = write_trace(tmp_path / "a.xplane.pb", {"/device:GPU:0": lines})
    trace = read_trace(file, "jit_step", schedule=Schedule(parse(TEXT)))
    assert trace.ops == {
        "cast_fusion.3": OpTime(1, pytest.approx(2e-6)),
        "cast_fusion.2": OpTime(1, pytest.approx(3e-6)),
        "custom-call.1": OpTime(1, pytest.approx(5e-6)),
        "attend.1": OpTime(1, pytest.approx(5e-6)),
        UNNAMED: OpTime(1, pytest.approx(1e-6)),
    }
    assert trace.busy_seconds == pytest.approx(16e-6)
    assert trace.span_seconds == pytest.approx(36e-6)
