"""The compiled programs of an elastic job: kept whole, and taken by every process that comes."""

import json
import os
import subprocess
import sys

import pytest

from praxis_lite.run.job.elastic import compiled_programs
from praxis_lite.run.job.job_dir import JobDir
from tests.support import process_pairs as pairs
from tests.support.job_runs import CHECKOUT, home, launch, lines_of


def start(job, members, *flags):
    """Runs a generation of a tiny job to its end; returns the counts of each member."""
    address = f"--coordinator=127.0.0.1:{pairs.free_port()}"
    env = {**os.environ, "PYTHONPATH": f"{CHECKOUT}:{home()}"}
    env |= {"XDG_CACHE_HOME": str(home() / "cache")}
    several = [address, f"--num_processes={len(members)}"] if len(members) > 1 else []
    done = pairs.ended([
        subprocess.Popen(
            [
                sys.executable, "-m", "tests.support.counted_start", str(job.elastic), str(member),
                ",".join(map(str, members)), "--exp=jobzoo.experiments.Tiny", "--packages=jobzoo",
                f"--job_log_dir={job.path}", *several,
                *([f"--process_id={index}"] if several else []), *flags,
            ],
            cwd=CHECKOUT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for index, member in enumerate(members)
    ])
    assert [item.code for item in done] == [0] * len(members), done
    return [json.loads(item.err.splitlines()[-1]) for item in done]


def test_a_program_is_there_whole_or_not_at_all_and_the_first_one_stays(tmp_path):
    files = compiled_programs._WholeFiles(tmp_path / "job/elastic/compiled")
    assert files.get("jit_step-7") is None
    (tmp_path / "job/elastic/compiled/.jit_step-7.new").write_bytes(b"half")  # Of a killed one.
    files.put("jit_step-7", b"program")
    files.put("jit_step-7", b"the same of another process")
    assert files.get("jit_step-7") == b"program"
    assert os.listdir(tmp_path / "job/elastic/compiled") == ["jit_step-7"]


@pytest.mark.slow
def test_a_start_on_a_mesh_that_was_seen_compiles_nothing_on_any_process(tmp_path):
    job, mesh = JobDir(tmp_path / "job"), "mesh.ici_mesh_shape=(1,2,1)"
    first = start(job, (0, 1), "--set", mesh, "run.num_train_steps=2")
    assert all(counts["compiled"] > 10 for counts in first)
    # What a restore needs besides is new.
    start(job, (0, 1), "--set", mesh, "run.num_train_steps=4")
    third = start(job, (3, 5), "--set", mesh, "run.num_train_steps=6")
    assert [counts["compiled"] for counts in third] == [0, 0]
    assert all(counts["asked"] > 10 for counts in third)
    assert [line["step"] for line in lines_of(job.metrics_jsonl)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_what_a_generation_of_seven_devices_left_is_evaluated_elsewhere(tmp_path):
    job = JobDir(tmp_path / "job")
    # Two processes of seven devices each were there, and one of them is left.
    start(job, (1,), "--set", "mesh.ici_mesh_shape=(1,7,2)", "run.num_train_steps=3")
    config = job.config_txt.read_text()
    assert "mesh.ici_mesh_shape=1,7,1" in config.splitlines()
    expected = lines_of(job.eval_metrics_jsonl)[-1]
    ended = launch("--mode=eval", f"--job_log_dir={job.path}")
    assert ended.code == 0 and "data 7" in ended.out, ended
    actual = lines_of(job.eval_metrics_jsonl)[-1]
    assert actual["step"] == expected["step"] == 3
    assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-6)
