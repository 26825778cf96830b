"""What is refused because it cannot fit, what is not, and how an out-of-memory is said."""

import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from praxis_lite import ConfigError
from praxis_lite.errors import OutOfMemory
from praxis_lite.job.processes import host_memory
from praxis_lite.partitioner import StateLayout, TrainState
from praxis_lite.trainer.memory import check_batch_fits, check_fits, saying_what_is_large
from tests.support.job_runs import home, launch
from tests.support.line_jobs import LINE

MIB = 1 << 20


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
    device = types.SimpleNamespace(platform=platform, memory_stats=lambda: stats)
    return types.SimpleNamespace(local_devices=[device] * count)


# On each of four devices 1.5 + 5 + 1.5 MiB, and the step's 4 bytes.
EACH = 8 * MIB + 4


@pytest.mark.parametrize(("mode", "bytes_needed"), [("train", 4 * EACH), ("eval", 11 * MIB)])
def test_simulated_devices_share_what_the_host_has(mode, bytes_needed, monkeypatch):
    layout, mesh = layout_of({"data": 4}), mesh_of_fakes(4, "cpu")
    monkeypatch.setattr(host_memory, "available_bytes", lambda: bytes_needed)
    check_fits(layout, mesh, mode)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: bytes_needed - 1)
    with pytest.raises(ConfigError, match="4 simulated devices.* available here") as refused:
        check_fits(layout, mesh, mode)
    said = str(refused.value)
    assert "mdl_vars/params/whole [1310720] float32, 5.0 MiB" in said
    assert ("opt_states/slots/wide" in said) == (mode == "train")


def test_an_accelerator_holds_what_its_own_memory_holds():
    layout = layout_of({"data": 4})
    check_fits(layout, mesh_of_fakes(2, "gpu", EACH), "train")
    check_fits(layout, mesh_of_fakes(2, "tpu"), "train")  # It says nothing of its memory.
    with pytest.raises(ConfigError, match=r"each device of the mesh holds 8.0 MiB.* has 8.0 MiB"):
        check_fits(layout, mesh_of_fakes(2, "gpu", EACH - 1), "train")


MEMINFO = "MemTotal: 64000 kB\nMemAvailable: 50000 kB\nSwapFree: {swap} kB\n"
V1 = {"limit": "memory.limit_in_bytes", "usage": "memory.usage_in_bytes", "prefix": "total_"}
V2 = {"limit": "memory.max", "usage": "memory.current", "prefix": ""}


def machine(root, *, cgroup="", groups=None, files=V2, swap=0):
    """Makes /proc and /sys/fs/cgroup below `root`; groups: (limit, usage, page cache) by folder."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(MEMINFO.format(swap=swap))
    (root / "proc/self/cgroup").write_text(cgroup)
    for folder, (limit, usage, cache) in (groups or {}).items():
        path = root / "sys/fs/cgroup" / folder
        path.mkdir(parents=True, exist_ok=True)
        (path / files["limit"]).write_text(f"{limit}\n")
        (path / files["usage"]).write_text(f"{usage}\n")
        half = cache // 2
        (path / "memory.stat").write_text(
            f"anon 1\n{files['prefix']}inactive_file {half}\n{files['prefix']}active_file {half}\n"
        )
    return host_memory.available_bytes(root)


WHOLE = 50_000 * 1024


def test_without_a_container_the_machine_says_what_is_available(tmp_path):
    assert machine(tmp_path / "a") == WHOLE
    assert machine(tmp_path / "b", swap=7) == WHOLE + 7 * 1024
    unlimited = {"": ("max", 5, 0), "user": ("max", 5, 0)}
    assert machine(tmp_path / "c", cgroup="0::/user\n", groups=unlimited) == WHOLE
    assert host_memory.available_bytes(tmp_path / "no proc") == float("inf")


def test_a_container_may_have_less_than_the_machine(tmp_path):
    # Version 2, seen from inside; what the page cache holds can be had.
    assert machine(tmp_path / "a", cgroup="0::/\n", groups={"": (9000, 5000, 1000)}) == 5000
    # A parent's limit is the child's too.
    nested = {"pods": (9000, 5000, 0), "pods/one": ("max", 3000, 0), "": ("max", 1, 0)}
    assert machine(tmp_path / "b", cgroup="0::/pods/one\n", groups=nested) == 4000
    # Version 1; the path is the host's, which is not mounted here.
    v1 = {"memory": (9000, 5000, 1000)}
    cgroup = "5:cpu:/\n4:memory:/docker/abc\n0::/\n"
    assert machine(tmp_path / "c", cgroup=cgroup, groups=v1, files=V1) == 5000


@pytest.mark.parametrize(
    "error",
    [
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 77 bytes.\nMore"),
        MemoryError("Unable to allocate 77 bytes for an array"),
    ],
)
def test_an_out_of_memory_is_one_paragraph_with_the_largest_arrays(error):
    with pytest.raises(OutOfMemory) as said, saying_what_is_large(layout_of({"data": 4})):
        raise error
    words = str(said.value)
    assert "ran out of memory" in words and "77 bytes" in words and "More" not in words
    assert "mdl_vars/params/whole [1310720] float32, 5.0 MiB" in words and "\n" not in words
    assert "batch_size" in words and said.value.exit_status == 2


def test_another_error_of_the_devices_stays_as_it_is():
    error = jax.errors.JaxRuntimeError("INTERNAL: a core melted")
    said = saying_what_is_large(layout_of({"data": 4}))
    with pytest.raises(jax.errors.JaxRuntimeError, match="melted"), said:
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



def test_a_batch_that_no_host_holds_is_refused_before_a_row_is_made():
    spec = {"ids": jax.ShapeDtypeStruct((10**9, 10**6), "int32")}
    with pytest.raises(ConfigError, match=r"datasets\.train takes 3\.6 PiB .*batch_size"):
        check_batch_fits(spec, 1.0, "datasets.train")
    check_batch_fits({"ids": jax.ShapeDtypeStruct((7, 11), "int32")}, 1.0, "datasets.train")
