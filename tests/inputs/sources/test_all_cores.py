"""Work by processes on all cores: results in order, errors with their kind, no process left."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from praxis_lite.core.errors import ConfigError
from praxis_lite.inputs.processes.all_cores import num_cores, on_all_cores
from praxis_lite.inputs.sources.faults import BadExample

two_cores = pytest.mark.skipif(num_cores() < 2, reason="one core does it in this process")


def slowest_first(item):
    time.sleep(0.2 * (item == 0))
    return item * item, os.getpid()


def third_is_bad(item):
    if item == 3:
        raise BadExample("not_utf8", "a.txt", "is not UTF-8", "Write it anew.")
    return item


def seventh_ends(item):
    if item == 7:
        os._exit(1)
    return item


@two_cores
def test_results_come_in_the_order_of_the_items():
    actual = on_all_cores(slowest_first, range(13), [1] * 13, "squaring", "B", is_worth_it=True)
    assert [square for square, _ in actual] == [n * n for n in range(13)]
    assert os.getpid() not in {process for _, process in actual}


def test_little_work_is_done_here():
    actual = on_all_cores(slowest_first, range(3), [1] * 3, "squaring", "B")
    assert actual == [(n * n, os.getpid()) for n in range(3)]


@pytest.mark.parametrize("is_worth_it", [False, pytest.param(True, marks=two_cores)])
def test_a_bad_example_is_one_in_this_process_too(is_worth_it):
    with pytest.raises(BadExample, match="a.txt.*UTF-8") as caught:
        on_all_cores(third_is_bad, range(7), [1] * 7, "", "B", is_worth_it=is_worth_it)
    assert caught.value.fault == "not_utf8"


@two_cores
def test_a_process_that_ends_by_itself_is_told():
    with pytest.raises(ConfigError, match=r"\(taskset\)"):
        on_all_cores(seventh_ends, range(13), [1] * 13, "", "B", is_worth_it=True)


@two_cores
def test_a_script_without_a_guard_is_told_and_does_not_wait_for_itself(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_bytes(b'{"n": 7}\n' * 1_000_000)
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(f"""\
        import sys
        sys.path[:0] = {sys.path!r}
        from praxis_lite.inputs import JsonLines
        JsonLines({f"{tmp_path}/*.jsonl"!r}).check()
    """))
    # More than 16 MiB, so that processes are started.
    assert sum(path.stat().st_size for path in tmp_path.glob("*.jsonl")) > 16 << 20
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "imports the script that was started" in ended.stderr
    assert "ended by itself" in ended.stderr.splitlines()[-1]


@pytest.mark.slow
@two_cores
def test_a_kill_leaves_no_process_behind(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(f"""\
        import os, sys, time
        sys.path[:0] = {sys.path!r}
        from praxis_lite.inputs.processes.all_cores import on_all_cores

        def stay(item):
            open({str(tmp_path)!r} + f"/{{item}}.pid", "w").write(str(os.getpid()))
            time.sleep(60)

        if __name__ == "__main__":
            on_all_cores(stay, range(2), [1, 1], "", "B", is_worth_it=True)
    """))
    parent = subprocess.Popen([sys.executable, script], stderr=subprocess.DEVNULL)
    pids = [until(lambda n=n: (tmp_path / f"{n}.pid").exists()
                  and (tmp_path / f"{n}.pid").read_text()) for n in range(2)]
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
