"""What becomes of a program whose output no one takes any more."""

import os
import subprocess
import sys

import pytest

from tests.support.job_runs import CHECKOUT, home
from tests.support.line_jobs import LINE

PRINTS = """
import sys
from praxis_lite.job.processes.standard_output import output_may_be_lost

with output_may_be_lost(continues=lambda: sys.argv[1] == "goes on"):
    print("first", flush=True)
    sys.stdin.readline()
    for _ in range(3):
        print("x" * 100_000)
    print("and an error", file=sys.stderr, flush=True)
    print("at the end", file=open(sys.argv[2], "w"))
"""


def start(what, path, stdout=subprocess.PIPE, **others):
    return subprocess.Popen(
        [sys.executable, "-c", PRINTS, what, path],
        cwd=CHECKOUT,
        text=True,
        stdout=stdout,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **others,
    )


@pytest.mark.parametrize("what", ["goes on", "ends"])
def test_a_reader_that_goes_away_ends_what_only_prints_and_no_training(what, tmp_path):
    process = start(what, tmp_path / "done")
    assert process.stdout.readline() == "first\n"
    process.stdout.close()
    process.stdin.write("\n")
    process.stdin.close()
    err = process.stderr.read()
    process.stderr.close()
    code = process.wait(60)
    if what == "goes on":
        assert code == 0 and (tmp_path / "done").read_text() == "at the end\n"
        first, second = err.splitlines()
        assert first.startswith("standard output cannot be written (Broken pipe); the job")
        assert second == "and an error"
    else:
        assert (code, err) == (141, "") and not (tmp_path / "done").exists()


def test_what_only_prints_ends_so_even_if_all_of_it_was_in_a_buffer(tmp_path):
    read, write = os.pipe()
    os.close(read)
    program = PRINTS.replace(", flush=True", "").replace("100_000", "10")
    done = subprocess.run(
        [sys.executable, "-c", program, "ends", tmp_path / "done"],
        cwd=CHECKOUT,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=write,
        stderr=subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "and an error\n")
    assert (tmp_path / "done").exists()


def test_a_full_disk_under_the_log_ends_no_training(tmp_path):
    with open("/dev/full", "w") as full:
        process = start("goes on", tmp_path / "done", stdout=full)
    err = process.communicate("\n", timeout=60)[1]
    assert process.returncode == 0 and (tmp_path / "done").exists()
    assert "standard output cannot be written (No space left on device)" in err


@pytest.mark.slow
def test_main_in_a_pipe_that_is_closed_ends_quietly():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "praxis_lite", "list"],
        cwd=CHECKOUT,
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=100,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.slow
def test_a_job_trains_where_its_streams_were_closed(tmp_path):
    command = (
        f"{sys.executable} -m praxis_lite {LINE} --packages=jobzoo --job_log_dir={tmp_path}/job "
        f"--set run.num_train_steps=2 mesh.ici_mesh_shape=1,1,1 0<&- 1>&- 2>&-"
    )
    env = {**os.environ, "PYTHONPATH": f"{CHECKOUT}:{home()}", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        ["bash", "-c", command], env=env, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert len((tmp_path / "job/metrics.jsonl").read_text().splitlines()) == 2
