"""Samples of damaged files, wrong targets and failing stores. `make faults` has thousands.

In `make test-all`, job/ and checkpoints/ test kills, ends in a save and full disks.
"""

import random
import re
import subprocess
import sys

import pytest

from tests.faults import damage as damages
from tests.faults import targets
from tests.faults.outcome import Row
from tests.faults.store_operations import OPERATIONS, Trial
from tests.faults.zoo import CHECKOUT
from tests.support.faulty_store import faulty_bucket

# These tests launch jobs.
pytestmark = pytest.mark.slow

SEED = 2


def passes(*rows):
    """Checks that all trials passed."""
    assert [failure for row in rows for failure in row.failures] == []
    assert all(row.tried for row in rows)


def test_a_flipped_bit_and_a_broken_file_are_told_and_the_step_before_is_used(zygote, damage):
    def some(step_dir, other):
        broken = random.Random(SEED).choice(list(damages.broken_files(step_dir, other)))
        return [*damages.flips(step_dir, 1, SEED), broken]

    passes(damage.files(Row("files"), some))


def test_a_wrong_target_is_refused_and_nothing_on_disk_changes(zygote, damage):
    # A weight that is only in the checkpoint; tests/trainer has other shapes and other data.
    passes(targets.run(zygote, damage.job, targets.TARGETS[8:9]))


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_a_failing_store_loses_and_repeats_nothing(scheme):
    with faulty_bucket(scheme, SEED, rate=0.2) as (url, proxy, client):
        trial = Trial(url, proxy, client, SEED)
        for operation in OPERATIONS:
            operation(trial, 3)
    assert trial.failures == [] and len(proxy.injected) >= 18


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
