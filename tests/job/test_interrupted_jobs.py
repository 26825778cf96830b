"""Signals to a job of two real processes while it saves, restores, compiles or evaluates.

One job is interrupted again and again on its way, for it is the launches that take the time.
"""

import dataclasses
import signal

import pytest

from tests.support import process_pairs as pairs
from tests.support.interrupted_jobs import Pair, steps_in

pytestmark = pytest.mark.slow


@dataclasses.dataclass(frozen=True)
class Interruption:
    """A launch of the job that was interrupted.

    Attributes:
      done: how both processes ended.
      answer: the line by which the process that got the first signal answered it.
      steps: the steps that were then there.
    """

    done: list[pairs.Ended]
    answer: str
    steps: list[str]


def interrupted(folder, place, *, twice=True):
    """Launches the job, and sends its second process one or two signals at a place."""
    gates = (place, "write of 14") if place == "evaluation" else (place,)
    # The save of step 14 would else be whole before the signal, or not.
    pair = Pair(folder, *gates)
    pair.reaches(place, "0" if place.startswith("digests") else "01")
    pair.signal(signal.SIGTERM)
    answer = pair.answer()
    if twice:
        pair.signal(signal.SIGINT)
    else:
        pair.opens(place)
    return Interruption(pair.ended(), answer, steps_in(pair.job))


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    """The job is ended by a second signal in a save, and resumed and ended by a single one."""
    folder = tmp_path_factory.mktemp("one")
    return [interrupted(folder, "write of 14", twice=twice) for twice in (True, False)]


def test_a_signal_while_a_step_is_saved_ends_both_with_a_later_step(launches):
    launch = launches[1]
    assert [process.code for process in launch.done] == [0, 0], launch
    assert launch.answer.startswith("WARNING: SIGTERM: ending after")
    # The step after that in which both agree; a save of step 21 may have been waited for.
    last = max(map(int, launch.steps))
    assert 14 < last < 29
    assert f"step {last} is saved, and the same command" in launch.done[0].out


def test_where_one_is_ended_at_once_the_other_hears_of_it(launches):
    check_heard(launches[0], "the newest checkpoint is of step 7")


def check_heard(launch, newest):
    """Checks that the second process was ended at once, and the first told so."""
    first, second = launch.done
    assert launch.answer.startswith("WARNING: SIGTERM: ending after")
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
