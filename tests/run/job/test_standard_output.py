"""What becomes of a program whose output no one takes any more."""

import os
import subprocess
import sys

import pytest

from tests.support.job_runs import CHECKOUT, copy_of_trained, home
from tests.support.process_pairs import KEPT

PRINTS = '''
import sys
from praxis_lite.run.job.processes.standard_output import output_may_be_lost

with output_may_be_lost(goes_on=sys.argv[1] == "goes on"):
    print("first", flush=True)
    sys.stdin.readline()
    for _ in range(3):
        print("x" * 100_000)
    print("and an error", file=sys.stderr, flush=True)
    print("at the end", file=open(sys.argv[2], "w"))
'''


def start(what, path, stdout=subprocess.PIPE, **others):
    return subprocess.Popen(
        [sys.executable, "-c", PRINTS, what, path], cwd=CHECKOUT, text=True, stdout=stdout,
        stdin=subprocess.PIPE, stderr=subprocess.PIPE, **others,
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
        assert first.startswith("standard output cannot be written (Broken pipe); the job goes on")
        assert second == "and an error"
    else:
        assert (code, err) == (141, "") and not (tmp_path / "done").exists()


def test_what_only_prints_ends_so_even_if_all_of_it_was_in_a_buffer(tmp_path):
    read, write = os.pipe()
    os.close(read)
    program = PRINTS.replace(", flush=True", "").replace("100_000", "10")
    done = subprocess.run(
        [sys.executable, "-c", program, "ends", tmp_path / "done"], cwd=CHECKOUT, text=True,
        stdin=subprocess.DEVNULL, stdout=write, stderr=subprocess.PIPE,
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


def test_main_in_a_pipe_that_is_closed_ends_quietly():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "praxis_lite.main", "--list"], cwd=CHECKOUT, stdout=write,
        stderr=subprocess.PIPE, text=True, timeout=100,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_gloos_lines_are_kept_off_the_output_and_no_others():
    program = """
import os
from praxis_lite.run.job.processes.standard_output import output_may_be_lost, without_lines_of_gloo

with output_may_be_lost(goes_on=True):
    print("before")
    without_lines_of_gloo()
    os.write(1, b"[Gloo] Rank 0 is connected to 1 peer ranks.\\nof another")
    print("of Python")
    os.write(1, b" library\\n[Gloo] Rank 1 is connected to 1 peer ranks.\\n")
print("after")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=CHECKOUT, text=True, capture_output=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert sorted(lines) == ["after", "before", "of Python", "of another library"]
    assert lines[0] == "before" and lines[-1] == "after"


ALL_CLOSED = "0<&- 1>&- 2>&-"


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["1>&-", ALL_CLOSED])
def test_a_stream_that_was_closed_is_nowhere_and_the_job_goes_on(tmp_path, closed):
    command = (
        f"{sys.executable} -m praxis_lite.main --exp=lm.Synthetic --job_log_dir={tmp_path}/job "
        f"--set run.num_train_steps=2 mesh.ici_mesh_shape=1,1,1 {closed}"
    )
    env = {**os.environ, "PYTHONPATH": str(CHECKOUT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        ["bash", "-c", command], env=env, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert len((tmp_path / "job/metrics.jsonl").read_text().splitlines()) == 2


COMMANDS = [  # JOB is a trained job, OUT a new directory.
    ("main --list", 0),
    ("main --mode=summary --job_log_dir=JOB", 0),
    ("main --mode=eval --job_log_dir=JOB --packages=jobzoo", 0),
    ("main --mode=decode --job_log_dir=JOB --packages=jobzoo", 0),
    ("main --mode=explain --exp=classify.Spirals --html=OUT.html", 0),
    ("main --mode=plan --exp=classify.Spirals --topology=cpu:2 --set mesh.ici_mesh_shape=1,2,1", 0),
    ("main --mode=check --exp=classify.Spirals --meshes=1x2x1", 0),
    ("main --mode=eval --job_log_dir=OUT", 2),
    ("main --no_such_option", 2),
    ("run.checkpoints ls JOB", 0),
    ("run.checkpoints digest JOB", 0),
    ("run.checkpoints verify OUT", 2),
    ("inputs digest --exp=classify.Spirals", 0),
    ("inputs.tokenizers train TEXTS/t0.txt OUT --vocab-size=270", 0),
    ("inputs.tokenizers show OUT", 2),
    ("tools.huggingface export JOB OUT", 2),
    ("tools.pax.job --exp=lm.Synthetic --pax=OUT --job_log_dir=OUT", 2),
]
# The first of each module, which all begin alike: streams are seen to before the options are.
BEGINNINGS = {item[0].split()[0]: item for item in reversed(COMMANDS)}.values()
CLOSED = [
    *((*item, ALL_CLOSED) for item in COMMANDS),
    *((*item, closed) for closed in ("1>&-", "2>&-") for item in BEGINNINGS),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "status", "closed"), CLOSED, ids=[f"{command} {how}" for command, _, how in CLOSED]
)
def test_any_command_keeps_its_status_where_its_streams_are_closed(
    command, status, closed, tmp_path
):
    job = copy_of_trained(tmp_path / "job").path
    for name, path in {"JOB": job, "OUT": tmp_path / "out", "TEXTS": home() / "texts"}.items():
        command = command.replace(name, str(path))
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m praxis_lite.{command} {closed}"], cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{CHECKOUT}:{home()}",
             "XDG_CACHE_HOME": str(home() / "cache"), **KEPT},
        capture_output=True, text=True, timeout=120,
    )
    assert done.returncode == status, done
    assert not any(word in done.stderr for word in ("Traceback", "Exception ignored", "lost sys"))
