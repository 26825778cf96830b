"""The events of a job: phases within phases, their seconds, and who is told."""

import pytest

from praxis_lite.job.events import DISPATCH, INIT, KINDS, SAVE, STEP, JobEvents, Listener
from tests.tools.goodput.launches import Clocks


class Heard(Listener):
    def __init__(self):
        self.calls = []

    def begins(self, phase, step):
        self.calls.append(("begins", phase.counts_as, phase.doing, step))

    def resumes(self, phase):
        self.calls.append(("resumes", phase.counts_as, phase.doing))

    def step_ended(self, step):
        self.calls.append(("step_ended", step))

    def progress(self):
        self.calls.append(("progress",))

    def report(self, facts):
        self.calls.append(("report", dict(facts)))


@pytest.fixture
def clocks():
    return Clocks()


@pytest.fixture
def events(clocks):
    return JobEvents(now=clocks.now, unix=clocks.unix)


def test_the_seconds_of_a_finer_phase_are_of_the_kind_around_it(events, clocks):
    events.begins(INIT)
    clocks.passes(2)
    with events.phase(STEP):
        clocks.passes(3)
        with events.phase("hook Mine"):
            clocks.passes(5)
            with events.phase(SAVE):
                clocks.passes(7)
            clocks.passes(11)
    clocks.passes(13)
    assert events.seconds() == dict.fromkeys(KINDS, 0.0) | {INIT: 15, STEP: 19, SAVE: 7}


def test_listeners_hear_what_the_main_thread_does_and_what_it_resumes(events):
    heard = Heard()
    with events.listening(heard), events.phase(STEP), events.phase(DISPATCH, 7):
        events.step_ended(7)
        events.progress()
        events.report(made=6, lost_to=None)
    assert heard.calls == [
        ("begins", STEP, "step", None),
        ("begins", STEP, "step on devices", 7),
        ("step_ended", 7),
        ("progress",),
        ("report", {"made": 6, "lost_to": None}),
        ("resumes", STEP, "step"),
        ("resumes", "import", ""),
    ]


def test_a_listener_is_told_within_its_context_alone_and_an_exception_resumes_the_phase(events):
    heard = Heard()
    with pytest.raises(KeyError), events.listening(heard), events.phase(SAVE):
        raise KeyError
    events.step_ended(1)
    assert heard.calls[-1] == ("resumes", "import", "")


def test_a_launch_counts_anew_from_when_it_began(events, clocks):
    clocks.passes(5)
    events.launched(clocks.unix_seconds - 3)
    clocks.passes(1)
    assert events.seconds()["import"] == pytest.approx(4) and events.began == clocks.unix() - 4
