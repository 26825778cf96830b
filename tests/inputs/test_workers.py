"""Batches from workers are those of the pipeline; no worker is missed, and none is left behind."""

import itertools
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from praxis_lite import ConfigError, OutOfMemory
from praxis_lite.inputs import SyntheticLm, WithWorkers
from praxis_lite.inputs.base import IndexedPipeline, spec_of

ROOT = Path(__file__).parents[2]


class Numbers(IndexedPipeline):
    """Thirteen batches of all kinds of leaves, or trouble at one of them."""

    batch_size = 5
    num_batches = 13

    def __init__(self, trouble=None, at=7, function=None):
        self.trouble = trouble
        self.at = at
        self.function = function

    def element_spec(self):
        return spec_of(x=((5, 3), np.float32))

    def fingerprint(self):
        return {"trouble": self.trouble}

    def rows(self, index, rows):
        if index == self.at and self.trouble == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if index == self.at and self.trouble == "exit":
            os._exit(3)
        if index == self.at and self.trouble == "raise":
            raise ZeroDivisionError("of the pipeline")
        if index == self.at and self.trouble == "config":
            raise ConfigError("the file is gone")
        if index == self.at and self.trouble == "memory":
            raise MemoryError("no 8 EiB")
        if index >= self.at and self.trouble == "hang":
            time.sleep(3600)
        count = rows.stop - rows.start
        first = 100 * index + rows.start
        return {
            "x": np.arange(first, first + count, dtype=np.float32)[:, None] * np.ones((1, 3)),
            "transposed": np.arange(7 * count, dtype=np.int16).reshape(7, count).T,
            "flags": np.arange(count) % 2 == 0,
            "index": np.float64(index),
            "pid": np.full(count, os.getpid()),
            "signals": np.array(
                [signal.getsignal(s) == signal.SIG_IGN for s in (signal.SIGINT, signal.SIGTERM)]
            ),
            "imported": np.array(["jax" in sys.modules, "tensorflow" in sys.modules]),
        }


def assert_same(got, wanted):
    assert len(got) == len(wanted) > 0
    for batch, expected in zip(got, wanted, strict=True):
        assert batch.keys() == expected.keys()
        for name in batch.keys() - {"pid", "signals", "imported"}:
            assert batch[name].dtype == expected[name].dtype
            np.testing.assert_array_equal(batch[name], expected[name])


@pytest.mark.parametrize(
    ("kind", "num_workers"), [("processes", 1), ("processes", 3), ("threads", 3)]
)
@pytest.mark.parametrize("rows", [slice(1, 4)])
def test_batches_are_those_of_the_pipeline_whatever_the_workers(kind, num_workers, rows):
    start = 2
    batches = list(WithWorkers(Numbers(), num_workers, 1, kind).batches(start, rows=rows))
    assert_same(batches, list(Numbers().batches(start, rows=rows)))
    if kind == "processes":
        pids = [int(batch["pid"][0]) for batch in batches]
        assert len(set(pids)) == num_workers and os.getpid() not in pids
        # The test's own module imports JAX for nothing but lazily: a worker starts in 0.3 s.
        for batch in batches:
            assert batch["signals"].all() and not batch["imported"].any()
        assert not any(map(is_running, pids))


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_the_workers_are_no_part_of_the_data():
    endless = SyntheticLm(37, 6, 13)
    pipeline = WithWorkers(endless, 2, kind="threads")
    pipeline.check()
    assert pipeline.fingerprint() == endless.fingerprint()
    assert pipeline.element_spec() == endless.element_spec()
    assert (pipeline.batch_size, pipeline.num_batches) == (6, None)
    got = itertools.islice(pipeline.batches(5), 23)
    assert_same(list(got), list(itertools.islice(endless.batches(5), 23)))


@pytest.mark.parametrize(
    ("trouble", "error", "words"),
    [
        ("kill", ConfigError, r"1.*2.*\(process \d+\).*Numbers.*SIGKILL.*[1357]"),
        pytest.param(
            "exit",
            ConfigError,
            r"1.*2.*\(process \d+\).*Numbers.* 3 .*[1357]",
            marks=pytest.mark.slow,
        ),
        ("raise", RuntimeError, "(?s)1 .*2 .*7.*Traceback.*of the pipeline"),
        pytest.param("config", ConfigError, "^the file is gone$", marks=pytest.mark.slow),
        pytest.param("memory", OutOfMemory, "no 8 EiB.*num_workers", marks=pytest.mark.slow),
    ],
)
def test_what_goes_wrong_in_a_worker_is_an_error_in_its_batchs_place(trouble, error, words):
    batches = WithWorkers(Numbers(trouble), 2).batches()
    got = []
    with pytest.raises(error, match=words):
        got.extend(batches)  # Adds one after another.
    # What a killed process had made ahead is lost with it.
    assert len(got) == 7 or (trouble in ("kill", "exit") and len(got) in (1, 3, 5))
    assert_same(got, list(itertools.islice(Numbers().batches(), len(got))))
    assert not any(is_running(int(batch["pid"][0])) for batch in got)


def test_an_error_in_a_thread_is_the_pipelines_own():
    with pytest.raises(ZeroDivisionError):
        list(WithWorkers(Numbers("raise"), 2, kind="threads").batches())


def test_a_training_that_stops_leaves_no_worker_behind():
    batches = WithWorkers(Numbers("hang", at=4), 2).batches()
    pids = [int(next(batches)["pid"][0]) for _ in range(2)]
    assert all(map(is_running, pids))
    batches.close()
    assert not any(map(is_running, pids))


PROGRAM = """
    import os, signal, sys
    from praxis_lite.inputs import WithWorkers
    from tests.inputs.test_workers import Numbers

    if __name__ == "__main__":
        batches = WithWorkers(Numbers("hang"), 2).batches()
        print(*(int(next(batches)["pid"][0]) for _ in range(2)), flush=True)
        {end}
"""
ENDS = {
    "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
    "SIGTERM": "os.kill(os.getpid(), signal.SIGTERM)",
    "an exception that keeps the batches": "kept = batches; raise RuntimeError",
    "os._exit": "os._exit(5)",
}


@pytest.mark.slow
def test_workers_end_with_their_parent_however_it_ends(tmp_path):
    """All ways at once: most of a process's time here is imports."""
    processes = []
    for name, end in ENDS.items():
        path = tmp_path / f"{name}.py"
        path.write_text(textwrap.dedent(PROGRAM.format(end=end)))
        processes.append(
            subprocess.Popen(
                [sys.executable, path],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        )
    for process, name in zip(processes, ENDS, strict=True):
        out, _ = process.communicate(timeout=120)
        assert process.returncode != 0
        pids = list(map(int, out.split()))
        assert len(pids) == 2
        deadline = time.monotonic() + 60  # A busy machine; on a quiet one they are gone at once.
        while any(map(is_running, pids)) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not any(map(is_running, pids)), name


@pytest.mark.parametrize(
    ("pipeline", "words"),
    [
        (WithWorkers(Numbers(), 0), "num_workers.*0"),
        (WithWorkers(Numbers(), 1, 0), "num_prefetched.*0"),
        (WithWorkers(Numbers(), 1, kind="fibers"), "kind.*'fibers'"),
        (WithWorkers(SyntheticLm(37, 0, 7), 1), "batch_size.*0"),
        (WithWorkers("numbers", 1), "pipeline.*str.*IndexedPipeline"),
    ],
)
def test_bad_settings_are_refused_before_the_first_batch(pipeline, words):
    for refused in pipeline.check, pipeline.batches:
        with pytest.raises(ConfigError, match=words):
            refused()


def test_a_pipeline_that_cannot_be_sent_is_refused():
    with pytest.raises(ConfigError, match="kind='threads'"):
        next(WithWorkers(Numbers(function=lambda: 1), 2).batches())
