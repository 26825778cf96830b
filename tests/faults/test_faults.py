"""The fault suite in its short form: a small sample of each fault. `make faults` has them all."""

import random

import pytest

from tests.faults import damage as damages
from tests.faults import kills, targets, ways_out
from tests.faults.outcome import Row, outcome_of
from tests.faults.zoo import home, train_argv

# Each launches jobs.
pytestmark = pytest.mark.slow

SEED = 2


def passes(*rows):
    """Checks that all that was tried went as it must."""
    assert [failure for row in rows for failure in row.failures] == []
    assert all(row.tried for row in rows)


def test_a_job_that_is_killed_again_and_again_ends_in_the_same_bits(zygote):
    whole, settings = home() / "killed_never", ("run.num_train_steps=24",)
    assert zygote.launch(train_argv(whole, *settings)).code == 0
    rows = kills.run(zygote, outcome_of(whole), 6, SEED, settings=settings)
    passes(*rows)
    assert {row.what.split()[0] for row in rows} >= {"KILL", "TERM"}


def test_a_flipped_bit_is_told_and_the_step_before_is_used(zygote, damage):
    row = damage.files(Row("flips"), lambda step, _: damages.flips(step, 2, SEED))
    passes(row)


def test_a_broken_file_is_told_and_the_step_before_is_used(zygote, damage):
    def some(step_dir, other):
        return random.Random(SEED).sample(list(damages.broken_files(step_dir, other)), 2)

    passes(damage.files(Row("files"), some))


@pytest.mark.parametrize("way", ["an exception", "SIGTERM"])
def test_leaving_waits_for_the_save_in_flight(zygote, damage, way):
    passes(*ways_out.leave(zygote, damage.whole, [way]))


@pytest.mark.skipif(not ways_out.can_mount(), reason="it takes root to mount a small disk")
def test_a_full_disk_costs_the_save_that_it_stops(zygote, damage):
    passes(*ways_out.fill(zygote, damage.whole, ways_out.DISKS[:1]))


def test_a_wrong_target_is_refused_and_nothing_on_disk_changes(zygote, damage):
    passes(targets.run(zygote, damage.job, targets.TARGETS[2::6]))
