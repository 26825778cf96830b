"""The pipeline's schedule, against a simulation that moves microbatches from stage to stage."""

import numpy as np
import pytest

from praxis_lite.layers.stacking.pipelining.schedules import Schedule

# (stages, microbatches, repeats); circular with fewer microbatches than stages included.
SIZES = [(1, 1, 1), (2, 5, 1), (3, 2, 1), (5, 7, 1), (3, 3, 2), (3, 7, 2), (2, 5, 3), (4, 1, 3)]


def simulated(num_stages, num_microbatches, num_repeats):
    """Returns a list per tick of what each stage works on: (microbatch, repeat), or (-1, -1).

    Stage 0 takes what waits longest of what has come furthest behind: all microbatches of one
    repeat before the first of the next.
    """
    waiting = [(m, 0) for m in range(num_microbatches)]
    stages, ticks, num_done = [None] * num_stages, [], 0
    while num_done < num_microbatches:
        out = stages[-1]
        stages = [None, *stages[:-1]]
        if out is not None:
            if out[1] + 1 == num_repeats:
                num_done += 1
            else:
                waiting.append((out[0], out[1] + 1))
        if waiting:
            stages[0] = waiting.pop(0)
        if num_done < num_microbatches:
            ticks.append([(-1, -1) if stage is None else stage for stage in stages])
    return ticks


def table_of(schedule):
    """Returns int [ticks, S, 2]: (microbatch, repeat), -1 for an idle stage."""
    ticks, stages = np.ogrid[: schedule.num_ticks, : schedule.num_stages]
    microbatch, repeat, is_valid = schedule.work(ticks, stages)
    return np.where(is_valid[..., None], np.stack([microbatch, repeat], axis=-1), -1)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_schedule_is_that_of_microbatches_moved_by_hand(sizes):
    schedule = Schedule(*sizes)
    np.testing.assert_array_equal(table_of(schedule), simulated(*sizes))
    assert schedule.num_ticks == len(simulated(*sizes))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_bubble_share_is_that_of_the_idle_stage_ticks_counted(sizes):
    schedule = Schedule(*sizes)
    table = table_of(schedule)
    assert schedule.bubble_share == pytest.approx((table[..., 0] < 0).mean())


@pytest.mark.parametrize("sizes", [s for s in SIZES if s[1] >= s[0] or s[2] == 1], ids=str)
def test_the_bubble_share_is_the_formula(sizes):
    stages, microbatches, repeats = sizes
    expected = (stages - 1) / (repeats * microbatches + stages - 1)
    assert Schedule(*sizes).bubble_share == pytest.approx(expected)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_each_microbatch_goes_through_every_stage_once_per_repeat_in_order(sizes):
    num_stages, num_microbatches, num_repeats = sizes
    table = table_of(Schedule(*sizes))
    for microbatch in range(num_microbatches):
        ticks, stages = np.nonzero(table[..., 0] == microbatch)
        visits = sorted(zip(ticks, table[ticks, stages, 1], stages, strict=True))
        order = [(repeat, stage) for _, repeat, stage in visits]
        assert order == [(r, s) for r in range(num_repeats) for s in range(num_stages)]
        assert len(set(ticks)) == len(ticks)


def test_an_idle_stage_is_given_work_that_there_is():
    """Its data are taken and its result dropped: an index out of range would be taken anyway."""
    schedule = Schedule(4, 5, 2)
    ticks, stages = np.ogrid[: schedule.num_ticks, :4]
    microbatch, repeat, _ = schedule.work(ticks, stages)
    assert microbatch.min() == 0 and microbatch.max() == 4
    assert repeat.min() == 0 and repeat.max() == 1
