"""tests.support.measure counts what each test uses, in each worker of pytest-xdist."""

import collections
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from tests.support import measure

ROOT = Path(__file__).parents[1]
TESTS = """
import multiprocessing, os, subprocess, sys, time
import pytest

@pytest.fixture(scope="module")
def slept():
    time.sleep(0.3)

def test_sleeps(slept):
    assert True

@pytest.mark.nightly
def test_launches():
    subprocess.run(["true"], check=True)
    subprocess.run([sys.executable, "-S", "-c", "sum(range(10**7))"], check=True)
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(0,))
    child.start()
    child.join()
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)

def test_fails():
    assert False
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("measured")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    (folder / "test_uses.py").write_text(TESTS)
    (folder / "test_skips.py").write_text("import pytest\ndef test_skips(): pytest.skip('x')\n")
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-n",
            "2",
            "--dist",
            "loadfile",
            "-p",
            "tests.support.measure",
            "--measure=measures.jsonl",
            "-p",
            "no:cacheprovider",
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
        capture_output=True,
    )
    return measure.read_measures([folder / "measures.jsonl"])


@pytest.mark.nightly
def test_each_test_of_each_worker_has_a_record(measured):
    assert {test.partition("::")[2]: x["outcome"] for test, x in measured.items()} == {
        "test_sleeps": "passed",
        "test_launches": "passed",
        "test_fails": "failed",
        "test_skips": "skipped",
    }
    assert [test for test, x in measured.items() if x["slow"]] == ["test_uses.py::test_launches"]


@pytest.mark.nightly
def test_a_fixture_counts_for_the_test_that_sets_it_up(measured):
    sleeps = measured["test_uses.py::test_sleeps"]
    assert sleeps["setup"] >= 0.3 > sleeps["call"]


@pytest.mark.nightly
def test_processes_are_counted_however_they_are_launched(measured):
    launches = {test: x["launches"] for test, x in measured.items()}
    # Two by subprocess, one by multiprocessing with its resource tracker, one fork.
    assert launches.pop("test_uses.py::test_launches") == 5
    assert set(launches.values()) == {0}
    assert measured["test_uses.py::test_launches"]["child_cpu"] > 0.05


def test_programs_are_counted():
    counts = collections.Counter()

    def count(name, amount=1):
        counts[name] += amount

    measure._count_programs(count)
    jax.jit(lambda x: x * 37 + 7)(257)
    assert counts["programs"] == 1 and counts["compile_seconds"] > 0


@pytest.mark.nightly
def test_tables_sum_by_file(measured):
    lines = [line.split() for line in measure.tables([*measured.values()])]
    assert ["all", "4"] in [line[:2] for line in lines]
    launched = lines[[line[:3] for line in lines].index(["files", "by", "processes"]) + 1]
    assert launched[:2] == ["test_uses.py", "3"] and launched[5] == "5"
