"""Work by processes on all cores: all of it done, errors with their kind, no process left."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from praxis_lite.core.errors import ConfigError
from praxis_lite.inputs.processes.all_cores import num_cores, run_on_all_cores
from praxis_lite.inputs.sources.faults import BadExample

two_cores = pytest.mark.skipif(num_cores() < 2, reason="one core does it in this process")


def note_process(path):
    path.write_text(str(os.getpid()))


def third_is_bad(item):
    if item == 3:
        raise BadExample("not_utf8", "a.txt", "is not UTF-8", "Write it anew.")
    return item


def seventh_ends(item):
    if item == 7:
        os._exit(1)
    return item


@pytest.mark.parametrize("size", [7, pytest.param(10_000, marks=two_cores)])
def test_each_item_is_done_in_other_processes_if_there_is_much(size, tmp_path):
    paths = [tmp_path / f"{n}" for n in range(13)]
    run_on_all_cores(note_process, paths, [size] * 13, "writing")
    processes = {int(path.read_text()) for path in paths}
    assert (os.getpid() in processes) == (size == 7)


@pytest.mark.parametrize("size", [7, pytest.param(10_000, marks=two_cores)])
def test_a_bad_example_is_one_in_this_process_too(size):
    with pytest.raises(BadExample, match="a.txt.*UTF-8") as caught:
        run_on_all_cores(third_is_bad, range(7), [size] * 7, "")
    assert caught.value.fault == "not_utf8"


@two_cores
def test_a_process_that_ends_by_itself_is_told():
    with pytest.raises(ConfigError, match=r"\(taskset\)"):
        run_on_all_cores(seventh_ends, range(13), [10_000] * 13, "")


@pytest.mark.slow
@two_cores
def test_a_script_without_a_guard_is_told_and_does_not_wait_for_itself(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_bytes(b'{"text": "a"}\n' * 9_000)
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""\
        import sys
        sys.path[:0] = {sys.path!r}
        from praxis_lite.inputs import Documents, JsonLines
        Documents(JsonLines({f"{tmp_path}/*.jsonl"!r})).check()
    """)
    )
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "a worker process imports it" in ended.stderr
    assert "ended unexpectedly" in ended.stderr.splitlines()[-1]


@pytest.mark.slow
@two_cores
def test_a_kill_leaves_no_process_behind(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""\
        import os, sys, time
        sys.path[:0] = {sys.path!r}
        from praxis_lite.inputs.processes.all_cores import run_on_all_cores

        def stay(item):
            open({str(tmp_path)!r} + f"/{{item}}.pid", "w").write(str(os.getpid()))
            time.sleep(60)

        if __name__ == "__main__":
            run_on_all_cores(stay, range(2), [10_000, 10_000], "")
    """)
    )
    parent = subprocess.Popen([sys.executable, script], stderr=subprocess.DEVNULL)
    pids = [
        until(lambda n=n: (tmp_path / f"{n}.pid").exists() and (tmp_path / f"{n}.pid").read_text())
        for n in range(2)
    ]
    parent.kill()
    parent.wait()
    for pid in pids:
        until(lambda pid=pid: not is_running(pid))


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not (actual := condition()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return actual
