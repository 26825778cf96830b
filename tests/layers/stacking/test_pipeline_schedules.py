"""The pipeline's schedule, against a simulation that moves microbatches from stage to stage."""

import numpy as np
import pytest

from praxis_lite.layers.stacking.pipelining.pipeline_schedules import InterleavedSchedule, Schedule

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


# (stages, microbatches, repeats) of 1F1B: also with groups that are not full.
INTERLEAVED = [(1, 3, 1), (4, 2, 1), (2, 5, 1), (3, 6, 2), (3, 7, 2), (4, 3, 3)]


def interleaved_tables(schedule):
    """Returns by (microbatch, repeat, stage) the tick forward, and that backward."""
    tables = []
    for work in (schedule.forward, schedule.backward):
        ticks, stages = np.ogrid[
            : schedule.first_backward + schedule.num_ticks, : schedule.num_stages
        ]
        microbatch, repeat, is_valid = np.broadcast_arrays(*work(ticks, stages))
        where = np.argwhere(is_valid)
        keys = [(int(microbatch[t, s]), int(repeat[t, s]), int(s)) for t, s in where]
        assert len(set(keys)) == len(keys)
        tables.append(dict(zip(keys, where[:, 0].tolist(), strict=True)))
    return tables


@pytest.mark.parametrize("sizes", INTERLEAVED, ids=str)
def test_each_microbatch_goes_tick_by_tick_through_all_stages_and_back(sizes):
    num_stages, num_microbatches, num_repeats = sizes
    forward, backward = interleaved_tables(InterleavedSchedule(*sizes))
    for microbatch in range(num_microbatches):
        way = [(microbatch, r, s) for r in range(num_repeats) for s in range(num_stages)]
        there, back = [forward[key] for key in way], [backward[key] for key in way[::-1]]
        # The gradient sets out in the tick in which the loss is known.
        ticks = [*there, *back[1:]]
        assert back[0] == there[-1]
        assert ticks == list(range(ticks[0], ticks[0] + len(ticks)))
    assert len(forward) == len(backward) == num_stages * num_microbatches * num_repeats


@pytest.mark.parametrize("sizes", INTERLEAVED, ids=str)
def test_inputs_that_are_kept_are_not_overwritten_before_they_go_backward(sizes):
    schedule = InterleavedSchedule(*sizes)
    forward, backward = interleaved_tables(schedule)
    for key, tick in backward.items():
        assert schedule.tick_forward(np.int64(tick), key[2]) == forward[key]
        assert tick - forward[key] < schedule.num_saved_inputs
    assert schedule.num_saved_inputs <= 2 * sizes[0] * sizes[2] - 1
    assert (
        InterleavedSchedule(sizes[0], 100, sizes[2]).num_saved_inputs == 2 * sizes[0] * sizes[2] - 1
    )


@pytest.mark.parametrize("split_backward", [False, True])
@pytest.mark.parametrize("sizes", INTERLEAVED, ids=str)
def test_the_phases_of_1f1b_contain_all_work(sizes, split_backward):
    schedule = InterleavedSchedule(*sizes, split_backward)
    forward, backward = interleaved_tables(schedule)
    phases = {t: parts for ticks, *parts in schedule.phases for t in ticks}
    assert sorted(phases) == list(range(schedule.first_backward + schedule.num_ticks))
    delay = {s: s if split_backward else 0 for s in range(sizes[0])}
    weights = {key: tick + delay[key[2]] for key, tick in backward.items()}
    for (microbatch, repeat, stage), tick in weights.items():
        # Split, all stages make those of the same microbatch.
        stage = np.arange(sizes[0]) if split_backward else np.int64(stage)
        actual = schedule.weights(np.int64(tick), stage)
        assert tuple(map(int, actual)) == (microbatch, repeat, 1)
    for part, table in enumerate((forward, backward, weights)):
        assert all(phases[tick][part] for tick in table.values())
    if split_backward and (sizes[2] == 1 or sizes[1] % sizes[0] == 0):
        # In ticks with weights' gradients no stage is idle.
        assert sum(parts[2] for parts in phases.values()) == sizes[1] * sizes[2]
