"""A small sample of each kind of fault. `make faults` runs the complete suite."""

import random
import re
import subprocess
import sys

import pytest

from tests.faults import damage as damages
from tests.faults import kills, store_jobs, targets, ways_out
from tests.faults.outcome import Row, outcome_of
from tests.faults.store_operations import OPERATIONS, Trial
from tests.faults.zoo import CHECKOUT, home, train_argv
from tests.support.faulty_store import faulty_bucket

# These tests launch jobs.
pytestmark = pytest.mark.slow

SEED = 2


def passes(*rows):
    """Checks that all trials passed."""
    assert [failure for row in rows for failure in row.failures] == []
    assert all(row.tried for row in rows)


@pytest.mark.nightly
def test_a_job_that_is_killed_again_and_again_ends_in_the_same_bits(zygote):
    whole, settings = home() / "killed_never", ("run.num_train_steps=24",)
    assert zygote.launch(train_argv(whole, *settings)).code == 0
    rows = kills.run(zygote, outcome_of(whole), 4, SEED, settings=settings)
    passes(*rows)
    assert {row.what.split()[0] for row in rows} >= {"SIGKILL", "SIGTERM"}


def test_a_flipped_bit_and_a_broken_file_are_told_and_the_step_before_is_used(zygote, damage):
    def some(step_dir, other):
        broken = random.Random(SEED).choice(list(damages.broken_files(step_dir, other)))
        return [*damages.flips(step_dir, 1, SEED), broken]

    passes(damage.files(Row("files"), some))


# job/test_stopping.py has each way out of a job in CI.
@pytest.mark.nightly
def test_leaving_waits_for_the_save_in_flight(zygote, damage):
    passes(*ways_out.leave(zygote, damage.whole, ["SIGTERM"]))


def test_a_wrong_target_is_refused_and_nothing_on_disk_changes(zygote, damage):
    # A weight that is only in the checkpoint; tests/trainer has other shapes and other data.
    passes(targets.run(zygote, damage.job, targets.TARGETS[8:9]))


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_a_failing_store_loses_and_repeats_nothing(scheme):
    with faulty_bucket(scheme, SEED, rate=0.2) as (url, proxy, client):
        trial = Trial(url, proxy, client, SEED)
        for operation in OPERATIONS:
            operation(trial, 3)
    assert trial.failures == [] and len(proxy.injected) >= 15


@pytest.mark.nightly
@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_a_job_in_a_failing_store_that_is_killed_ends_in_the_same_bits(scheme):
    settings = ("run.num_train_steps=12",)
    passes(*store_jobs.run(scheme, 60, 3, SEED, print, settings=settings)[-3:])


# job/test_disk_full.py and checkpoints/test_saving.py fill disks in CI.
@pytest.mark.nightly
@pytest.mark.skipif(not ways_out.can_mount(), reason="mounting a disk requires root")
def test_a_full_disk_costs_the_save_that_it_stops(zygote, damage):
    # Fill the disk of the job directory itself, which takes one launch less.
    passes(*ways_out.fill(zygote, damage.whole, ways_out.DISKS[2:3]))


def test_each_reader_of_files_reads_or_refuses_what_is_broken():
    # Use a new process, because only a process without threads can be forked for each file.
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.faults",
            "--only",
            "file readers",
            "--num_files=17",
            f"--seed={SEED}",
        ],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"damaged .*: 1 of 1", done.stdout)) == 17, done.stdout
