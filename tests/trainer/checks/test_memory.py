"""What is refused because it cannot fit, what is not, and how an out-of-memory is said."""

import errno
import itertools
import re
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from praxis_lite.core import StateLayout, TrainState
from praxis_lite.core.errors import OutOfMemory
from praxis_lite.host import host_memory
from praxis_lite.host.lack_of_memory import lack_of_memory
from praxis_lite.inputs.base import IndexedPipeline, spec_of
from praxis_lite.inputs.workers import WithWorkers
from praxis_lite.trainer.checks.memory import check_batch_fits, check_fits, explaining_out_of_memory
from tests.support.commands import status_of
from tests.support.job_runs import CHECKOUT, copy_of_trained, home, launch, loaded
from tests.support.line_jobs import LINE

MIB = 1 << 20


class TooMuch(IndexedPipeline):
    """Rows that no machine can hold."""

    num_batches = None

    def __init__(self, batch_size):
        self.batch_size = batch_size

    def element_spec(self):
        return spec_of(ids=((self.batch_size,), np.int32))

    def fingerprint(self):
        return {}

    def rows(self, index, rows):
        return {"ids": np.ones(1 << 60, np.int32)}


def layout_of(axis_sizes):
    """Returns a state of 6 MiB split over `data`, 5 MiB on each device, and a slot of 6 MiB."""
    shapes = {"wide": (3 * MIB // 2,), "whole": (5 * MIB // 4,)}
    specs = {"wide": PartitionSpec("data"), "whole": PartitionSpec(None)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    step = jax.ShapeDtypeStruct((), jnp.int32)
    slots = {"slots": {"wide": params["wide"]}}
    return StateLayout(
        TrainState(step, {"params": params}, slots),
        TrainState(PartitionSpec(), {"params": specs}, {"slots": {"wide": specs["wide"]}}),
        axis_sizes,
    )


def mesh_of_fakes(count, platform, limit=None):
    stats = None if limit is None else {"bytes_limit": limit}
    device = types.SimpleNamespace(
        platform=platform, memory_stats=lambda: stats, process_index=jax.process_index()
    )
    return types.SimpleNamespace(local_devices=[device] * count)


# On each of four devices 1.5 + 5 + 1.5 MiB, and the step's 4 bytes.
EACH = 8 * MIB + 4


@pytest.mark.parametrize(("mode", "bytes_needed"), [("train", 4 * EACH), ("eval", 11 * MIB)])
def test_simulated_devices_share_what_the_host_has(mode, bytes_needed, monkeypatch):
    layout, mesh = layout_of({"data": 4}), mesh_of_fakes(4, "cpu")
    monkeypatch.setattr(host_memory, "available_bytes", lambda: bytes_needed)
    check_fits(layout, mesh, mode)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: bytes_needed - 1)
    with pytest.raises(OutOfMemory, match="MiB.* 4 .*MiB") as refused:
        check_fits(layout, mesh, mode)
    message = str(refused.value)
    assert "mdl_vars/params/whole [1310720] float32, 5.0 MiB" in message
    assert ("opt_states/slots/wide" in message) == (mode == "train")


def test_an_accelerator_holds_what_its_own_memory_holds():
    layout = layout_of({"data": 4})
    check_fits(layout, mesh_of_fakes(2, "gpu", EACH), "train")
    check_fits(layout, mesh_of_fakes(2, "tpu"), "train")  # It says nothing of its memory.
    with pytest.raises(OutOfMemory, match=r"8.0.*MiB.*8.0.*MiB"):
        check_fits(layout, mesh_of_fakes(2, "gpu", EACH - 1), "train")


WHOLE = 50_000 * 1024
V1 = {"limit": "memory.limit_in_bytes", "usage": "memory.usage_in_bytes", "prefix": "total_"}
V2 = {"limit": "memory.max", "usage": "memory.current", "prefix": ""}


@pytest.fixture
def free_swap(monkeypatch):
    """Pretends a machine of 50,000 kB of available memory; yields its bytes of free swap."""
    swap = types.SimpleNamespace(free=0)
    monkeypatch.setattr(
        host_memory.psutil, "virtual_memory", lambda: types.SimpleNamespace(available=WHOLE)
    )
    monkeypatch.setattr(host_memory.psutil, "swap_memory", lambda: swap)
    return swap


def container(root, *, cgroup, groups, files=V2):
    """Makes /proc and /sys/fs/cgroup below `root`; groups: (limit, usage, page cache) by folder."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    for folder, (limit, usage, cache) in groups.items():
        path = root / "sys/fs/cgroup" / folder
        path.mkdir(parents=True, exist_ok=True)
        (path / files["limit"]).write_text(f"{limit}\n")
        (path / files["usage"]).write_text(f"{usage}\n")
        half = cache // 2
        (path / "memory.stat").write_text(
            f"anon 1\n{files['prefix']}inactive_file {half}\n{files['prefix']}active_file {half}\n"
        )
    return host_memory.available_bytes(root)


def test_without_a_container_the_memory_of_the_machine_is_available(tmp_path, free_swap):
    assert host_memory.available_bytes(tmp_path / "no groups") == WHOLE
    unlimited = {"": ("max", 5, 0), "user": ("max", 5, 0)}
    assert container(tmp_path / "c", cgroup="0::/user\n", groups=unlimited) == WHOLE
    free_swap.free = 7
    assert host_memory.available_bytes(tmp_path / "no groups") == WHOLE + 7


def test_a_container_may_have_less_than_the_container(tmp_path):
    # Version 2, seen from inside; what the page cache holds can be had.
    assert container(tmp_path / "a", cgroup="0::/\n", groups={"": (9000, 5000, 1000)}) == 5000
    # A parent's limit is the child's too.
    nested = {"pods": (9000, 5000, 0), "pods/one": ("max", 3000, 0), "": ("max", 1, 0)}
    assert container(tmp_path / "b", cgroup="0::/pods/one\n", groups=nested) == 4000
    # Version 1; the path is the host's, which is not mounted here.
    v1 = {"memory": (9000, 5000, 1000)}
    cgroup = "5:cpu:/\n4:memory:/docker/abc\n0::/\n"
    assert container(tmp_path / "c", cgroup=cgroup, groups=v1, files=V1) == 5000


@pytest.mark.parametrize(
    "error",
    [
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 77 bytes.\nMore"),
        MemoryError("Unable to allocate 77 bytes for an array"),
    ],
)
def test_an_out_of_memory_is_one_paragraph_with_the_largest_arrays(error):
    with pytest.raises(OutOfMemory) as message, explaining_out_of_memory(layout_of({"data": 4})):
        raise error
    words = str(message.value)
    assert "ran out of memory" in words and "77 bytes" in words and "More" not in words
    assert "mdl_vars/params/whole [1310720] float32, 5.0 MiB" in words and "\n" not in words
    assert "batch_size" in words and message.value.exit_status == 2


def test_another_error_of_the_devices_stays_as_it_is():
    error = jax.errors.JaxRuntimeError("INTERNAL: a core melted")
    message = explaining_out_of_memory(layout_of({"data": 4}))
    with pytest.raises(jax.errors.JaxRuntimeError, match="melted"), message:
        raise error


def test_a_job_that_runs_out_of_memory_in_a_step_ends_with_a_paragraph(tmp_path, monkeypatch):
    home()
    from jobzoo.lines import Lines

    rows_of = Lines.rows

    def rows(self, index, rows):
        if index == 3:
            jnp.zeros((1 << 20, 1 << 20, 1 << 10)).block_until_ready()  # 4 PiB.
        return rows_of(self, index, rows)

    monkeypatch.setattr(Lines, "rows", rows)
    done = launch(LINE, f"--job_log_dir={tmp_path}")
    assert done.code == 2 and "Traceback" not in done.err, done
    assert "ran out of memory" in done.err and "mdl_vars/params/w [5] float32" in done.err


@pytest.mark.parametrize("donates", [False, True])
def test_a_program_fits_if_its_outputs_and_temporaries_do(donates, monkeypatch):
    n = 1009
    program = jax.jit(lambda x: jnp.sin(x) + 1, donate_argnums=(0,) if donates else ())
    compiled = program.lower(jax.ShapeDtypeStruct((n, n), jnp.float32)).compile()
    devices = mesh_of_fakes(3, "cpu").local_devices
    needed = 0 if donates else 3 * 4 * n * n  # An output that is not its argument's buffer.
    monkeypatch.setattr(host_memory, "available_bytes", lambda: needed)
    host_memory.check_program_fits(compiled, devices, "It", "Do.")
    if not donates:
        monkeypatch.setattr(host_memory, "available_bytes", lambda: 2 * 4 * n * n)
        with pytest.raises(OutOfMemory, match=r"11.7.*MiB.*7.8.*MiB.*3"):
            host_memory.check_program_fits(compiled, devices, "It", "Do.")
        gpus = mesh_of_fakes(3, "gpu").local_devices
        host_memory.check_program_fits(compiled, gpus, "It", "Do.")
        with pytest.raises(OutOfMemory, match="23.3.*MiB"):
            host_memory.check_program_fits(compiled, devices, "It", "Do.", num_processes=2)


def test_a_program_is_looked_at_once_for_each_key_and_again_if_it_was_refused(monkeypatch):
    looks = []

    def check(compiled, devices, program, advice):
        looks.append((program, advice, len(devices)))
        if len(looks) == 2:
            raise OutOfMemory("It takes too much.")

    monkeypatch.setattr(host_memory, "check_program_fits", check)
    runs, double = host_memory.FirstRuns("It", "Do."), jax.jit(lambda x: 2 * x)
    for _ in range(3):
        assert runs.run(double, jnp.float32(3)) == 6
    with pytest.raises(OutOfMemory):
        runs.run(double, jnp.ones(2), key=2)
    for _ in range(2):
        assert runs.run(double, jnp.ones(2), key=2).sum() == 4
    assert looks == 3 * [("It", "Do.", 1)]


def large_program(number, monkeypatch):
    """Lets XLA say of the program that is looked at as the `number`-th that it takes 4 PiB."""
    looks = itertools.count(1)

    def memory_analysis(self):
        temp = 1 << 52 if next(looks) == number else 0
        return types.SimpleNamespace(
            argument_size_in_bytes=0,
            output_size_in_bytes=0,
            alias_size_in_bytes=0,
            temp_size_in_bytes=temp,
            host_argument_size_in_bytes=0,
            host_output_size_in_bytes=0,
            host_alias_size_in_bytes=0,
            host_temp_size_in_bytes=0,
        )

    monkeypatch.setattr(jax.stages.Compiled, "memory_analysis", memory_analysis)


def test_a_step_that_the_host_cannot_hold_is_refused_before_it_runs(tmp_path, monkeypatch):
    home()
    large_program(2, monkeypatch)  # The first makes the state.
    done = launch(LINE, f"--job_log_dir={tmp_path}")
    message = " ".join(done.err.split())
    assert done.code == 2 and "A training step on datasets.train needs 8.0 PiB" in message, done
    assert "2 simulated devices, with 4.0 PiB of temporaries" in message
    assert "datasets.train.batch_size" in message and "Traceback" not in message
    assert not (tmp_path / "metrics.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "number", "words"),
    [
        (["--exp=jobzoo.experiments.Tiny"], 1, "Initializing the state needs"),
        (["--exp=jobzoo.experiments.Tiny"], 3, "An evaluation step on datasets.heldout needs"),
        (["--mode=decode"], 1, "A decoding step on decode_datasets.prompts needs"),
        (["--mode=decode", "--prompt=1 plus"], 1, "Decoding 1 rows at a time needs"),
        (["--mode=decode", "--prompt=1 plus"], 3, "Decoding 1 rows at a time needs"),
    ],
)
def test_any_step_is_looked_at_before_it_runs(argv, number, words, tmp_path, monkeypatch):
    job = tmp_path / "new" if "--mode" not in argv[0] else copy_of_trained(tmp_path / "job").path
    large_program(number, monkeypatch)
    done = launch(*argv, f"--job_log_dir={job}")
    assert done.code == 2 and words in " ".join(done.err.split()), done
    assert "Traceback" not in done.err


@pytest.mark.slow
def test_a_call_from_python_is_looked_at_before_it_runs(tmp_path, monkeypatch):
    model = loaded(copy_of_trained(tmp_path / "job"))
    ids = np.ones((7, 11), np.int32)
    expected = model.predict(ids)
    large_program(1, monkeypatch)
    again = model.predict(ids)  # Looked at before.
    jax.tree.map(np.testing.assert_array_equal, again, expected)
    with pytest.raises(OutOfMemory, match="4.0.*PiB"):
        model.predict(ids[:5])


@pytest.mark.slow
def test_a_step_that_was_looked_at_is_not_compiled_again(tmp_path, caplog):
    with jax.log_compiles():
        done = launch("--exp=jobzoo.experiments.Tiny", f"--job_log_dir={tmp_path}")
    assert done.code == 0, done
    compiled = re.findall(r"Finished XLA compilation of jit\((_\w+_step|_init)\)", caplog.text)
    assert sorted(compiled) == ["_eval_step", "_init", "_train_step"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kilobytes", "words"),
    [
        (1_200_000, "The limit of this process's address space (ulimit -v) leaves"),
        pytest.param(
            4_000_000, "A training step on datasets.train needs", marks=pytest.mark.nightly
        ),
    ],
)
def test_a_limit_of_the_shell_ends_a_job_in_a_paragraph(kilobytes, words, tmp_path):
    command = (
        f"ulimit -v {kilobytes}; {sys.executable} -m praxis_lite --exp=lm.Synthetic "
        f"--job_log_dir={tmp_path}/job --set datasets.train.seq_len=256 "
        "datasets.train.batch_size=30000"
    )
    done = subprocess.run(
        ["bash", "-c", command], cwd=CHECKOUT, capture_output=True, text=True, timeout=120
    )
    message = " ".join(done.stderr.split())
    assert done.returncode == 2 and words in message and "Traceback" not in message


MEMORY_ENDS = [
    MemoryError(),
    MemoryError("std::bad_alloc"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    RuntimeError("can't start new thread"),
    ValueError("RESOURCE_EXHAUSTED: 77 bytes"),
    jax.errors.JaxRuntimeError("INTERNAL: CUDA_ERROR_OUT_OF_MEMORY: out of memory"),
    type("ResourceExhaustedError", (Exception,), {})("OOM when allocating tensor"),
]


@pytest.mark.parametrize("error", MEMORY_ENDS, ids=repr)
def test_memory_that_ends_anywhere_in_a_command_is_a_paragraph(error, capsys):
    def command():
        try:
            raise error
        except type(error) as cause:
            raise KeyError("what came of it") from cause

    assert status_of(command, continues_without_output=True) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: The process ran out of memory: ")
    assert "\n\n" not in message


def test_a_message_that_is_too_large_for_grpc_is_no_lack_of_memory():
    words = "RESOURCE_EXHAUSTED: CLIENT: Received message larger than max (5 vs. 4)"
    assert lack_of_memory(jax.errors.JaxRuntimeError(words)) is None
    assert lack_of_memory(ValueError("half of it")) is None


@pytest.mark.slow
def test_a_worker_without_memory_ends_the_job_in_a_paragraph(tmp_path):
    pipeline = WithWorkers(TooMuch(batch_size=7), num_workers=1)
    with pytest.raises(OutOfMemory, match="num_workers"):
        next(iter(pipeline.batches()))


def test_a_batch_that_no_host_holds_is_refused_before_a_row_is_made():
    spec = {"ids": jax.ShapeDtypeStruct((10**9, 10**6), "int32")}
    with pytest.raises(OutOfMemory, match=r"datasets\.train.*3\.6.*PiB.*batch_size"):
        check_batch_fits(spec, 1.0, "datasets.train")
    check_batch_fits({"ids": jax.ShapeDtypeStruct((7, 11), "int32")}, 1.0, "datasets.train")
