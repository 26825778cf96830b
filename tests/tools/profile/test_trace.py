"""The reader of traces, against sums by hand; as CPUs, GPUs and TPUs write them."""

import pytest

from praxis_lite import ConfigError
from praxis_tools.profile.trace import OpTime, read_trace
from tests.support.traces import write_trace


def on_cpu(op, start, duration, device, run, module="jit_step"):
    stats = {"hlo_op": op, "hlo_module": module, "device_ordinal": device, "run_id": run}
    return (op, start, duration, stats)


def test_on_cpu_events_name_device_and_run_whatever_their_thread(tmp_path):
    threads = {
        "a": [on_cpu("dot.1", 10, 5, 0, 7), on_cpu("dot.1", 40, 7, 1, 8), ("Rendezvous", 0, 9, {})],
        "b": [
            on_cpu("while.1", 10, 12, 0, 7),
            on_cpu("add.1", 13, 9, 0, 7),
            on_cpu("mul.1", 14, 2, 0, 7),
            on_cpu("mul.1", 18, 2, 0, 7),
            on_cpu("dot.1", 100, 1, 0, 9),
            on_cpu("dot.9", 0, 4, 0, 1, "jit_other"),
        ],
    }
    file = write_trace(tmp_path / "a.xplane.pb", {"/host:CPU": threads})
    trace = read_trace(file, "jit_step", ["while.1"])
    assert trace.devices == {0, 1}
    assert trace.ops == {
        "dot.1": OpTime(3, pytest.approx(13e-6)),
        "add.1": OpTime(1, pytest.approx(9e-6)),
        "mul.1": OpTime(2, pytest.approx(4e-6)),
    }
    # On device 0 all but the last overlap: 10 to 22, and 100 to 101; on device 1 40 to 47.
    assert trace.busy_seconds == pytest.approx(20e-6)
    assert sorted(trace.run_seconds) == pytest.approx([1e-6, 7e-6, 12e-6])
    assert trace.other_seconds == {"jit_other": pytest.approx(4e-6)}


def test_on_gpu_the_plane_is_the_device(tmp_path):
    streams = {
        "Stream #13": [("gemm_kernel", 0, 3, {"hlo_op": "dot.1", "hlo_module": "jit_step"})],
        "Stream #14": [("nccl", 2, 6, {"hlo_op": "all-reduce-start", "hlo_module": "jit_step"})],
    }
    file = write_trace(tmp_path / "a.xplane.pb", {"/device:GPU:3": streams})
    trace = read_trace(file, "jit_step")
    assert trace.devices == {3}
    assert {op: ran.count for op, ran in trace.ops.items()} == {"dot.1": 1, "all-reduce-start": 1}
    assert trace.busy_seconds == pytest.approx(8e-6)
    assert trace.run_seconds == []


def test_on_tpu_a_line_has_the_instructions_and_another_the_programs_around_them(tmp_path):
    lines = {
        "XLA Modules": [
            ("jit_step(12)", 0, 10, {}),
            ("jit_other(3)", 20, 10, {}),
            ("jit_step(12)", 40, 10, {}),
        ],
        "XLA Ops": [
            ("%fusion.1 = bf16[8,128] fusion(%p)", 1, 3, {}),
            ("%while.2 = (s32[]) while(%t)", 4, 6, {}),
            ("dot.3", 4, 5, {}),
            ("dot.3", 21, 5, {}),
            ("dot.3", 41, 2, {}),
            ("lost", 90, 1, {}),
        ],
    }
    file = write_trace(tmp_path / "a.xplane.pb", {"/device:TPU:1": lines, "/host:CPU": {}})
    trace = read_trace(file, "jit_step", ["while.2"])
    assert trace.ops == {
        "fusion.1": OpTime(1, pytest.approx(3e-6)),
        "dot.3": OpTime(2, pytest.approx(7e-6)),
    }
    assert trace.other_seconds == {"jit_other": pytest.approx(5e-6)}
    assert sorted(trace.run_seconds) == pytest.approx([2e-6, 9e-6])


def test_a_trace_without_the_program_and_a_file_that_is_none_are_refused(tmp_path):
    file = write_trace(
        tmp_path / "a.xplane.pb", {"/host:CPU": {"a": [on_cpu("dot.1", 0, 1, 0, 1, "jit_other")]}}
    )
    with pytest.raises(ConfigError, match="no instructions from jit_step, only from jit_other"):
        read_trace(file, "jit_step")
    file.write_bytes(b"no trace")
    with pytest.raises(ConfigError, match=r"a\.xplane\.pb cannot be read as a trace"):
        read_trace(file, "jit_step")
    with pytest.raises(ConfigError, match=r"b\.xplane\.pb cannot be read as a trace"):
        read_trace(tmp_path / "b.xplane.pb", "jit_step")
