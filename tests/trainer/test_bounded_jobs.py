"""Jobs on streams and on bounded copies of stored files resume exactly after they are killed."""

import contextlib
import itertools
import os
import re
import signal
import threading

import numpy as np
import pytest

from praxis_lite.host.object_stores import StorePath
from praxis_lite.inputs import FromSource, NpyFiles, WithWorkers
from praxis_lite.inputs.processes.stream_digest import stream_digest
from praxis_lite.job.job_dir import JobDir
from tests.support import process_pairs
from tests.support.fake_gcs import gcs_bucket
from tests.support.fake_s3 import s3_bucket
from tests.support.job_runs import home, launch, lines_of, start_process, succeed

pytestmark = pytest.mark.slow
COUNTS = (31, 17, 53, 29, 7, 41)
CACHE_BYTES = 160_000

EXPERIMENTS = """
import os
import signal

import datasets
import fiddle as fdl
import jax.numpy as jnp
import numpy as np
import optax

from praxis_lite import Experiment, MeshConfig, RunConfig, SaveSettings, register
from praxis_lite.core import Learner
from praxis_lite.inputs import FromIterableDataset, FromSource, NpyFiles
from praxis_lite.models import FunctionModel
from praxis_lite.tasks.loss import LossTask


def init(key):
    return {"w": jnp.zeros(3)}


def loss(params, inputs, key):
    return (inputs["x"] @ params["w"] - inputs["y"]) ** 2


def row(number):
    if os.environ.get("KILL_AT_ROW") == str(number):
        os.kill(os.getpid(), signal.SIGKILL)
    x = np.sin(np.arange(3, dtype=np.float32) + number)
    return {"x": x, "y": x.sum() + np.float32(number % 7)}


def is_even(example):
    return example["x"][0] % 2 == 0


def features(example):
    return row(int(example["x"][0]))


def rows(shards):
    for shard in shards:
        for number in range(17):
            yield row(17 * shard + number)


def stream():
    shards = {"shards": list(range(7))}
    return datasets.IterableDataset.from_generator(rows, gen_kwargs=shards).repeat(None)


class Small(Experiment):
    def mesh(self):
        return fdl.Config(MeshConfig, ici_mesh_shape=(1, 2, 1))

    def task(self):
        learner = fdl.Config(Learner, optimizer=fdl.Partial(optax.adamw), learning_rate=0.1)
        batch = (("replica", "data"),)
        return fdl.Config(
            LossTask, fdl.Config(FunctionModel, init), loss, learner,
            inputs_split_mapping={"map_1d": batch, "map_2d": batch},
        )

    def run(self):
        saves = fdl.Config(SaveSettings, every_steps=3)
        return fdl.Config(RunConfig, num_train_steps=20, checkpoints=saves)


@register
class Bounded(Small):
    bucket = ""

    def datasets(self):
        source = fdl.Config(NpyFiles, f"{self.bucket}/data/*.npy", cache_bytes=160_000)
        return {
            "train": fdl.Config(
                FromSource, source, 8, transform=features, shuffle=True, shuffle_window=19
            )
        }


@register
class Stream(Small):
    bucket = ""

    def datasets(self):
        return {"train": fdl.Config(FromIterableDataset, stream, 8, shuffle_window=30)}
"""


@contextlib.contextmanager
def with_rows(bucket, folder):
    """Writes files into an empty bucket, whose URL it yields."""
    (home() / "streamzoo.py").write_text(EXPERIMENTS)
    with bucket as url:
        first, file = 0, folder / "rows.npy"
        for number, count in enumerate(COUNTS):
            rows = np.arange(first, first + count, dtype=np.float32)
            np.save(file, np.repeat(rows[:, None], 250, axis=1))
            StorePath.opened(f"{url}/data/{number}.npy").upload(file)
            first += count
        yield url


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    with with_rows(s3_bucket(), tmp_path_factory.mktemp("rows")) as url:
        yield url


@pytest.fixture(scope="module")
def gs(tmp_path_factory):
    with with_rows(gcs_bucket(), tmp_path_factory.mktemp("rows")) as url:
        yield url


def sizes_until(done, folder, sizes):
    """Appends the total size of all copies, until the event `done`."""
    while not done.wait(0.005):
        # Names contain the sizes, also of incomplete copies.
        names = [name for *_, names in os.walk(folder) for name in names if ".npy" in name]
        sizes.append(sum(int(name.split("-")[1]) for name in names))


@pytest.mark.parametrize("store", ["s3", "gs"])
def test_processes_share_the_bound_and_read_the_same_rows(store, request, tmp_path, monkeypatch):
    bucket = request.getfixturevalue(store)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def pipeline(**settings):
        source = NpyFiles(f"{bucket}/data/*.npy", **settings)
        return FromSource(source, 7, seed=1, shuffle=True, shuffle_window=19)

    done, sizes = threading.Event(), []
    thread = threading.Thread(target=sizes_until, args=(done, tmp_path, sizes))
    thread.start()
    try:
        bounded = pipeline(cache_bytes=CACHE_BYTES)
        expected = stream_digest(bounded, 60)
        assert stream_digest(bounded, 60, num_processes=3) == expected
        batches = itertools.islice(bounded.batches(), 60)
        for ours, theirs in zip(WithWorkers(bounded, 3).batches(), batches, strict=False):
            np.testing.assert_array_equal(ours["x"], theirs["x"])
    finally:
        done.set()
        thread.join()
    assert sum(COUNTS) * 1000 > CACHE_BYTES >= max(sizes) > 100_000
    assert stream_digest(pipeline(), 60) == expected  # With copies of all files.


def test_all_processes_select_examples_within_the_bound(s3, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    import streamzoo

    # Only the two largest files fit, so a process must close its file when it has read it.
    source = NpyFiles(f"{s3}/data/*.npy", cache_bytes=100_000)
    data = FromSource(source, 2, keep=streamzoo.is_even, shuffle=False)
    rows = np.concatenate([batch["x"][:, 0] for batch in data.batches()])
    assert rows[: sum(COUNTS) // 2].tolist() == list(range(0, sum(COUNTS), 2))


@pytest.mark.parametrize(
    ("name", "store"),
    [
        ("Bounded", "s3"),
        pytest.param("Bounded", "gs", marks=pytest.mark.nightly),
        ("Stream", "s3"),
    ],
)
def test_a_killed_job_resumes_exactly(name, store, request, tmp_path):
    bucket = request.getfixturevalue(store)
    flags = (f"--exp=streamzoo.{name}", "--packages=streamzoo", "--set", f"bucket={bucket}")
    killed, whole = JobDir(tmp_path / "killed"), JobDir(tmp_path / "whole")
    succeed(*flags, f"--job_log_dir={whole.path}")
    # Row 101 is first read in step 7 or later.
    argv = (*flags, f"--job_log_dir={killed.path}")
    process = start_process(*argv, cwd=tmp_path, env={"KILL_AT_ROW": "101"})
    _, err = process.communicate(timeout=240)
    assert process.returncode == -signal.SIGKILL, err
    done = launch(*argv)
    assert done.code == 0, done.err
    step = int(re.search(r"restored the checkpoint of step (\d+)", done.out)[1])
    # A stream is read again from the start of its window, a multiple of 30 examples.
    num_recomputed = step - step * 8 // 30 * 30 // 8
    message = f"recomputing {num_recomputed} batches before batch {step}:"
    assert (message in done.out) == (name == "Stream")
    assert lines_of(killed.path / "metrics.jsonl") == lines_of(whole.path / "metrics.jsonl")
    proof = launch("inputs", "digest", f"--job={killed.path}", "--packages=streamzoo")
    assert "every example exactly once" in proof.out, proof.err
    whole_proof = launch("inputs", "digest", f"--job={whole.path}", "--packages=streamzoo")
    digests = [line for line in proof.out.splitlines() if line.startswith("digest")]
    assert digests and digests[0] in whole_proof.out


@pytest.mark.parametrize("name", [pytest.param("Bounded", marks=pytest.mark.nightly), "Stream"])
def test_another_number_of_processes_continues_with_the_next_rows(s3, tmp_path, name):
    job = JobDir(tmp_path / "job")
    flags = (f"--exp=streamzoo.{name}", "--packages=streamzoo", f"--job_log_dir={job.path}")
    settings = ("--set", f"bucket={s3}", "run.num_train_steps=10")
    ended = process_pairs.run(*flags, *settings, cwd=tmp_path)
    assert [process.code for process in ended] == [0, 0], ended
    done = succeed(*flags, "--set", f"bucket={s3}", "run.num_train_steps=25")
    assert "restored the checkpoint of step 10" in done.out
    proof = launch("inputs", "digest", f"--job={job.path}", "--packages=streamzoo")
    assert "2 processes" in proof.out and "1 process," in proof.out
    assert "every example exactly once" in proof.out, proof.err
