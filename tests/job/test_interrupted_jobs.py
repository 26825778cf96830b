"""Signals to a job of two real processes while it saves, restores, compiles or evaluates.

One job is interrupted again and again on its way, for it is the launches that take the time.
"""

import dataclasses
import signal
from pathlib import Path

import pytest

from tests.support import process_pairs as pairs
from tests.support.interrupted_jobs import Pair, numbers_of, steps_in, uninterrupted

pytestmark = pytest.mark.slow


@dataclasses.dataclass(frozen=True)
class Interruption:
    """A launch of the job that was interrupted.

    Attributes:
      done: how both processes ended.
      answers: the lines by which the processes that got the first signal answered it.
      steps: the steps that were then there.
    """

    done: list[pairs.Ended]
    answers: list[str]
    steps: list[str]


@dataclasses.dataclass(frozen=True)
class Story:
    """A job that was interrupted at several places.

    Attributes:
      launches: the interruptions, by the places.
      folder: the folder of the job.
    """

    launches: dict[str, Interruption]
    folder: Path


def interrupted(folder, place, who="1", *, twice=True):
    """Launches the job, and sends signals at a place: to `who` of both, and, if twice, again."""
    gates = (place, "write of 14") if place == "evaluation" else (place,)
    # The save of step 14 would else be whole before the signal, or not.
    pair = Pair(folder, *gates)
    pair.reaches(place, "0" if place.startswith("digests") else "01")
    pair.signal(signal.SIGTERM, who)
    answers = pair.answer(who)
    if twice:
        pair.signal(signal.SIGINT, who)
    else:
        pair.opens(place)
    return Interruption(pair.ended(), answers, steps_in(pair.job))


def story_of(folder, places, who):
    """Returns the story of a job that a second signal ends at `places`, and the first in a save."""
    launches = {place: interrupted(folder, place, who) for place in places}
    launches["a save, once"] = interrupted(folder, "write of 14", who, twice=False)
    return Story(launches, folder)


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """The second process alone gets the signals."""
    return story_of(tmp_path_factory.mktemp("one"), ("write of 14",), "1")


@pytest.fixture(scope="module")
def story_of_both(tmp_path_factory):
    return story_of(tmp_path_factory.mktemp("both"), ("write of 14",), "01")


def check_single_signal(story, who):
    """Checks that a signal while a step is saved ended both with a later step."""
    launch = story.launches["a save, once"]
    assert [process.code for process in launch.done] == [0, 0], launch
    assert len(launch.answers) == len(who)
    assert all(line.startswith("WARNING: SIGTERM: ending after") for line in launch.answers)
    # The step after that in which both agree; a save of step 21 may have been waited for.
    last = max(map(int, launch.steps))
    assert 14 < last < 29
    assert f"step {last} is saved, and the same command" in launch.done[0].out


def check_end(story):
    """Checks that the job goes on from there to the numbers of one that nobody interrupts."""
    pair = Pair(story.folder)
    first, second = pair.ended()
    assert (first.code, second.code) == (0, 0), (first, second)
    last = max(map(int, story.launches["a save, once"].steps))
    assert f"restored the checkpoint of step {last}" in first.out
    assert numbers_of(pair.job) == uninterrupted()
    assert steps_in(pair.job)[-1] == "29"


def test_a_signal_while_a_step_is_saved_ends_both_with_a_later_step(story):
    check_single_signal(story, "1")


# In CI, job/test_multiprocess.py compares a job of two processes that was stopped with one process.
@pytest.mark.nightly
def test_an_interrupted_job_ends_with_the_numbers_of_one_that_nobody_interrupts(story):
    check_end(story)


def test_where_one_is_ended_at_once_the_other_hears_of_it(story):
    check_heard(story.launches["write of 14"], "the newest checkpoint is of step 7")


def check_heard(launch, newest):
    """Checks that the second process was ended at once, and the first told so."""
    first, second = launch.done
    assert launch.answers[0].startswith("WARNING: SIGTERM: ending after")
    assert (first.code, second.code) == (130, 130), launch
    assert f"was ended by SIGINT, the second signal; {newest}. This process also" in first.err
    assert "error: process 1 (" in first.err
    assert second.err.endswith(f"ended at once; {newest}\n")
    assert launch.steps[-1:] == [s for s in [newest.split()[-1]] if s.isdecimal()]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("place", "newest"),
    [
        ("compile", "no step had been completed"),
        ("evaluation", "the newest checkpoint is of step 7"),
        ("restore", "the newest checkpoint is of step 7"),
        ("digests of 14", "the newest checkpoint is of step 7"),
        ("write of 29", "the newest checkpoint is of step 28"),
    ],
)
def test_also_there_the_other_hears_of_it(tmp_path, place, newest):
    if place in ("restore", "evaluation"):
        interrupted(tmp_path, "write of 14")
    check_heard(interrupted(tmp_path, place), newest)


@pytest.mark.nightly
def test_both_may_get_the_signals(story_of_both):
    done = story_of_both.launches["write of 14"].done
    assert [process.code for process in done] == [130, 130], done
    words = "SIGINT, the second signal: ended at once; the newest checkpoint is of step 7"
    assert all(words in process.err for process in done), done
    check_single_signal(story_of_both, "01")
    check_end(story_of_both)


# checkpoints/test_cancelled_saves.py cancels the save of two processes in CI.
@pytest.mark.nightly
@pytest.mark.parametrize("who", ["1", "01"])
def test_a_second_signal_in_python_cancels_the_save_and_the_process_goes_on(tmp_path, who):
    pair = Pair(tmp_path, "write of 14", "wait for 14", in_python=True)
    pair.reaches("write of 14")
    pair.reaches("wait for 14")  # Before, one might wait for the other on its devices.
    pair.signal(signal.SIGTERM, who)
    pair.answer(who)
    pair.signal(signal.SIGINT, who)
    assert all("the second signal: the step is not saved" in line for line in pair.answer(who))
    if who != "01":
        pair.opens("write of 14")  # The other process writes its part to the end.
    done = pair.ended()
    for k, process in enumerate(done):
        if str(k) in who:
            words = "The save of step 14 was cancelled. The newest checkpoint is of step 7"
            assert words in process.out + process.err, done
            assert "raised KeyboardInterrupt: SIGINT" in process.out, done
        else:
            assert "raised FailedSave: The checkpoint of step 14 could not be saved" in process.out
            assert f"process {1 - k}: it was cancelled by a signal" in process.out, done
    assert sorted(path.name for path in pair.job.checkpoints.iterdir()) == ["7"]
