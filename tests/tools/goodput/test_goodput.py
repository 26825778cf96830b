"""Each second of a job is of one kind: sums by hand, on clocks that pass only when told."""

import json
import re

import pytest

from praxis_lite import ConfigError
from praxis_lite.job.events import (
    COMPILE,
    EVALUATION,
    IMPORT,
    INIT,
    INPUT_WAIT,
    RESTORE,
    SAVE,
    STEP,
)
from praxis_lite.job.job_dir import JobDir
from praxis_tools.goodput.goodput import (
    IDLE,
    KINDS,
    LOST_STEP,
    REGROUPING,
    goodput_of,
    note_goodput,
)
from praxis_tools.goodput.spans import Span, read_spans
from tests.tools.goodput.launches import Clocks, FakeLaunch


@pytest.fixture
def job(tmp_path):
    return JobDir(tmp_path)


def seconds_of(job):
    """Returns the seconds of the kinds that had any, having checked that all add up."""
    actual = goodput_of(job)
    assert tuple(actual.seconds) == KINDS
    assert sum(actual.seconds.values()) == pytest.approx(actual.total_seconds, abs=1e-3)
    launches = actual.launches
    assert launches[-1].ended - launches[0].began == pytest.approx(actual.total_seconds, abs=1e-3)
    for launch in launches:
        assert sum(launch.seconds.values()) == pytest.approx(launch.ended - launch.began, abs=1e-3)
    return {kind: round(value, 3) for kind, value in actual.seconds.items() if value}


def test_three_launches_two_of_them_killed_add_up_to_all_of_the_time(job):
    clocks = Clocks()
    first = FakeLaunch(job.timeline_jsonl, clocks)
    clocks.passes(3)  # As import, which a launch begins with.
    first.events.begins(INIT)
    clocks.passes(2)
    first.spends(COMPILE, 7)
    first.timeline.report({"trains_from": 0})
    first.steps(1, 5, 0.5)
    first.spends(INPUT_WAIT, 0.25)
    first.spends(EVALUATION, 1.5)
    first.saves(5, 0.75)
    first.steps(6, 8, 0.5)
    first.spends(STEP, 0.125)  # In step 9.
    first.killed(unseen=0.4)
    clocks.passes(60)
    second = FakeLaunch(job.timeline_jsonl, clocks)
    second.events.begins(INIT)
    second.spends(COMPILE, 11)
    second.killed(unseen=0.9)
    clocks.passes(30)
    third = FakeLaunch(job.timeline_jsonl, clocks)
    clocks.passes(4)
    third.spends(RESTORE, 2)
    third.timeline.report({"trains_from": 5})
    third.steps(6, 10, 0.25)
    third.saves(10, 1)
    third.ends()
    assert seconds_of(job) == {
        IMPORT: 7.0,
        INIT: 2.0,
        COMPILE: 18.0,
        RESTORE: 2.0,
        INPUT_WAIT: 0.25,
        STEP: 5 * 0.5 + 5 * 0.25,
        LOST_STEP: 3 * 0.5 + 0.125,
        EVALUATION: 1.5,
        SAVE: 1.75,
        IDLE: 0.4 + 60 + 0.9 + 30,
    }
    actual = goodput_of(job)
    assert [
        (item.first_step, item.last_step, item.ended_by, item.num_lost_steps)
        for item in actual.launches
    ] == [
        (0, 8, None, 3),
        (None, None, None, 0),
        (5, 10, "the end", 0),
    ]
    assert actual.share == pytest.approx(3.75 / actual.total_seconds)
    text = str(actual)
    assert re.search(r"lost step +1\.6 ", text) and "3 steps recomputed" in text
    assert actual.line().startswith("goodput 2.9% of 129 s in 3 launches; idle 70.7%, ")


def test_a_roll_back_loses_steps_within_a_launch_and_across_saves(job):
    clocks = Clocks()
    launch = FakeLaunch(job.timeline_jsonl, clocks, from_step=0)
    launch.steps(1, 4, 1)
    launch.saves(4, 0.5)
    launch.steps(5, 8, 1)
    launch.saves(8, 0.5)  # Of which nothing came: the steps after 4 are lost.
    launch.steps(9, 10, 1)
    launch.spends(RESTORE, 2)
    launch.timeline.report({"trains_from": 4})
    launch.steps(5, 12, 1)
    launch.saves(12, 0.5)
    launch.ends("SIGTERM")
    assert seconds_of(job) == {STEP: 12.0, LOST_STEP: 6.0, RESTORE: 2.0, SAVE: 1.5}
    (actual,) = goodput_of(job).launches
    assert (actual.num_lost_steps, actual.ended_by) == (6, "SIGTERM")


def test_steps_that_are_lost_twice_count_once_each_time_that_they_were_made(job):
    clocks = Clocks()
    for first, last in ((0, 7), (0, 3), (0, 9)):
        launch = FakeLaunch(job.timeline_jsonl, clocks, from_step=first)
        launch.steps(first + 1, last, 1)
        launch.killed()
    assert seconds_of(job) == {STEP: 9.0, LOST_STEP: 10.0}
    assert goodput_of(job).num_lost_steps == 10


def test_the_step_in_which_a_launch_is_killed_is_lost_even_right_after_a_save(job):
    clocks = Clocks()
    launch = FakeLaunch(job.timeline_jsonl, clocks, from_step=0)
    launch.steps(1, 3, 1)
    launch.saves(3, 1)
    launch.spends(STEP, 0.8)
    launch.killed()
    assert seconds_of(job) == {STEP: 3.8, SAVE: 1.0}  # Nobody has made it again so far.
    launch = FakeLaunch(job.timeline_jsonl, clocks, from_step=3)
    launch.steps(4, 4, 1)
    launch.ends()
    assert seconds_of(job) == {STEP: 4.0, LOST_STEP: 0.8, SAVE: 1.0}
    assert goodput_of(job).num_lost_steps == 0


def test_steps_of_the_last_second_before_a_kill_are_counted_by_the_launch_that_finds_them(job):
    clocks = Clocks()
    launch = FakeLaunch(job.timeline_jsonl, clocks, from_step=0)
    launch.steps(1, 3, 1)
    launch.killed(unseen=0.75)  # In which it made steps 4 to 6, a line of metrics.jsonl each.
    launch = FakeLaunch(job.timeline_jsonl, clocks, from_step=0)
    launch.timeline.report({"lost_to": 6})
    launch.steps(1, 2, 1)
    launch.saves(2, 1)
    launch.ends()
    assert seconds_of(job) == {STEP: 2.0, LOST_STEP: 3.0, SAVE: 1.0, IDLE: 0.75}
    assert [item.num_lost_steps for item in goodput_of(job).launches] == [6, 0]
    assert goodput_of(job).launches[0].last_step == 6


def test_a_launch_goes_on_from_a_step_that_no_line_begins_with(job):
    """Lines that a disk did not take: the steps share their span's seconds alike."""
    clocks = Clocks()
    launch = FakeLaunch(job.timeline_jsonl, clocks, from_step=0)
    launch.steps(1, 8, 1)
    launch.killed()
    launch = FakeLaunch(job.timeline_jsonl, clocks, from_step=6)
    launch.steps(7, 7, 1)
    launch.ends()
    assert seconds_of(job) == {STEP: 7.0, LOST_STEP: 2.0}


def test_a_second_save_of_a_step_and_a_later_launch_lose_nothing(job):
    clocks = Clocks()
    launch = FakeLaunch(job.timeline_jsonl, clocks, from_step=0)
    launch.steps(1, 3, 1)
    launch.saves(3, 1)
    launch.saves(3, 1)
    launch.ends()
    launch = FakeLaunch(job.timeline_jsonl, clocks, from_step=3)
    launch.steps(4, 5, 1)
    launch.ends()
    assert seconds_of(job) == {STEP: 5.0, SAVE: 2.0}


def test_clocks_that_are_set_back_and_launches_that_overlap_still_add_up(job):
    clocks = Clocks()
    launch = FakeLaunch(job.timeline_jsonl, clocks)
    clocks.passes(10)
    launch.ends()
    clocks.unix_seconds -= 3600  # By more than the next launch imports for.
    launch = FakeLaunch(job.timeline_jsonl, clocks)
    clocks.passes(5)
    launch.ends()
    actual = goodput_of(job)
    assert actual.seconds[IMPORT] == actual.total_seconds == pytest.approx(15.0)
    clocks.unix_seconds -= 2  # The process began while the one before ended.
    launch = FakeLaunch(job.timeline_jsonl, clocks)
    clocks.passes(6)
    launch.ends()
    actual = goodput_of(job)
    assert actual.total_seconds == pytest.approx(15 + 6 - 2)
    assert actual.launches[2].began == actual.launches[1].ended


def test_the_line_of_a_span_is_written_anew_in_its_place(job):
    clocks = Clocks()
    launch = FakeLaunch(job.timeline_jsonl, clocks)
    for kind in (COMPILE, RESTORE, EVALUATION):
        launch.spends(kind, 123456.7891)
        launch.killed()
    assert len(job.timeline_jsonl.read_text().splitlines()) == 1
    launch.timeline.report({"trains_from": 0})
    launch.saves(1, 1)  # The new line is shorter than the one before.
    launch.ends()
    lines = job.timeline_jsonl.read_text().splitlines()
    assert [json.loads(line)["seconds"] for line in lines] == [
        dict.fromkeys((COMPILE, RESTORE, EVALUATION), 123456.7891),
        {SAVE: 1.0},
    ]


def test_a_launch_that_found_nothing_to_do_leaves_the_file_as_it_was(job):
    clocks = Clocks()
    FakeLaunch(job.timeline_jsonl, clocks).ends()
    before = job.timeline_jsonl.read_bytes()
    launch = FakeLaunch(job.timeline_jsonl, clocks)
    launch.timeline.report({"nothing_to_do": "trained"})
    launch.ends()
    assert job.timeline_jsonl.read_bytes() == before


STRANGE = [
    "{",
    "[]",
    "7",
    "null",
    '"a"',
    "\0\0",
    "[" * 100_000,
    '{"launch": 1}',
    *(
        json.dumps(
            {
                "launch": 5.0,
                "first_step": 0,
                "last_step": 3,
                "seconds": {STEP: 1.0},
                "ended_by": None,
            }
            | change
        )
        for change in (
            {"launch": "x"},
            {"launch": -1},
            {"launch": 1e300},
            {"launch": True},
            {"first_step": 4},
            {"first_step": None},
            {"last_step": 2**40},
            {"first_step": 0.0},
            {"seconds": []},
            {"seconds": {STEP: -1}},
            {"seconds": {STEP: "1"}},
            {"seconds": {"sleep": 1.0}},
            {"seconds": {LOST_STEP: 1.0}},
            {"ended_by": 7},
            {"launch": 10**400},
            {"lost_to": -1},
            {"lost_to": "2"},
            {"lost_to": True},
        )
    ),
    '{"launch": NaN, "first_step": 0, "last_step": 3, "seconds": {}, "ended_by": null}',
    '{"launch": 5, "first_step": 0, "last_step": 3, "seconds": {"step": 1}, "ended_by": nul',
]


def test_lines_of_strangers_are_left_out(job):
    clocks = Clocks()
    launch = FakeLaunch(job.timeline_jsonl, clocks, from_step=0)
    launch.steps(1, 3, 1)
    launch.ends()
    whole = job.timeline_jsonl.read_bytes()
    for line in STRANGE:
        job.timeline_jsonl.write_bytes(line.encode("latin-1") + b"\n")
        assert read_spans(job.timeline_jsonl) == [] and goodput_of(job) is None, line
    rest = "\n".join(STRANGE).encode("latin-1")
    job.timeline_jsonl.write_bytes(b"\xff\xfe\n" + rest + b"\n" + whole + rest)
    assert seconds_of(job) == {STEP: 3.0}
    words = json.loads(whole) | {"ended_by": "\x1b[31m" + "x" * 1000}
    job.timeline_jsonl.write_text(json.dumps(words) + "\n")
    assert len(goodput_of(job).launches[0].ended_by) < 100 and "\x1b" not in str(goodput_of(job))


def test_a_launch_without_a_second_has_no_share(job):
    line = Span(5.0, None, None, {}).line()
    job.timeline_jsonl.write_text(line)
    assert goodput_of(job).line().startswith("steps took 0 of 0 s (startup")
    assert "goodput: 0.0%" in str(goodput_of(job))


def test_a_line_that_was_cut_short_stays_apart_from_the_next_launch(job):
    clocks = Clocks()
    job.timeline_jsonl.write_text('{"launch": 5.0, "first_st')
    launch = FakeLaunch(job.timeline_jsonl, clocks)
    launch.spends(COMPILE, 3)
    launch.ends()
    assert seconds_of(job) == {COMPILE: 3.0}
    launch = FakeLaunch(job.timeline_jsonl, clocks)  # After a complete line.
    launch.spends(COMPILE, 4)
    launch.ends()
    assert [line[:1] for line in job.timeline_jsonl.read_text().splitlines()] == ["{"] * 3


def test_no_file_is_no_goodput_and_a_file_that_cannot_be_read_is_named(job):
    assert goodput_of(job) is None
    job.timeline_jsonl.mkdir()
    with pytest.raises(ConfigError, match=r"timeline\.jsonl"):
        goodput_of(job)
    notes = []
    note_goodput(job, notes.append)  # At the end of training it is no error.
    assert len(notes) == 1 and str(job.timeline_jsonl) in notes[0]


def test_a_file_that_cannot_be_written_is_said_once_and_written_when_it_can(job):
    clocks = Clocks()
    job.timeline_jsonl.mkdir()
    launch = FakeLaunch(job.timeline_jsonl, clocks, from_step=0)
    launch.steps(1, 2, 1)
    launch.saves(2, 1)
    launch.killed()
    assert len(launch.notes) == 1 and str(job.timeline_jsonl) in launch.notes[0]
    job.timeline_jsonl.rmdir()
    launch.steps(3, 3, 1)
    launch.ends()
    assert len(launch.notes) == 2 and launch.notes[1].endswith("can be written again")
    assert seconds_of(job) == {STEP: 3.0, SAVE: 1.0}


def test_what_lies_between_launches_while_hands_change_is_no_idle_time(job):
    clocks = Clocks()
    first = FakeLaunch(job.timeline_jsonl, clocks, from_step=0)
    first.steps(1, 4, 1)
    first.killed(unseen=0.5)
    died = clocks.unix_seconds
    clocks.passes(3)  # Noticed and agreed upon.
    second = FakeLaunch(job.timeline_jsonl, clocks, from_step=4)
    second.spends(RESTORE, 2)
    second.steps(5, 6, 1)
    second.ends("SIGTERM")
    clocks.passes(60)
    started = clocks.unix_seconds
    clocks.passes(7)
    third = FakeLaunch(job.timeline_jsonl, clocks, from_step=6)
    third.steps(7, 8, 1)
    third.ends()
    fields = dict(who=[1], why="", members=[0], reached=True)
    lines = [
        {"generation": 1, "time": died, "kind": "died", "seconds": {"notice": 2, "agree": 3}},
        # Of the same gap, and told twice.
        {"generation": 2, "time": died + 1, "kind": "died", "seconds": {"notice": 1}},
        # All of the job was started again: before that there was nobody.
        {"generation": 3, "time": started, "kind": "start", "seconds": {"agree": 6.0}},
    ]
    text = "".join(json.dumps(line | fields) + "\n" for line in lines)
    job.elastic_jsonl.write_text(text + "{")
    assert seconds_of(job) == {
        STEP: 8.0,
        RESTORE: 2.0,
        REGROUPING: 0.5 + 3.0 + 6.0,
        IDLE: 60 + 1.0,
    }


@pytest.mark.parametrize(("seconds", "has_share"), [(40, False), (599, False), (601, True)])
def test_a_short_first_run_has_seconds_and_no_share(job, seconds, has_share):
    parts = {COMPILE: 35.0, STEP: seconds - 35.0}
    job.timeline_jsonl.write_text(Span(5.0, None, None, parts).line())
    line = goodput_of(job).line()
    assert ("goodput" in line) == has_share
    assert has_share or f"steps took {seconds - 35} of {seconds} s; compile 35 s" in line
