"""The decision who is stuck, on simulated histories of several processes: culprits, and nobody."""

import dataclasses
import math
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import pytest

from praxis_lite.job.processes.stacks import request_stacks
from praxis_tools.stuck.decision import Decision, Stuck
from praxis_tools.stuck.on_host import describe_state, progress_of_pid
from praxis_tools.stuck.progress import MEETING, ON_DEVICES, Progress, ProgressRecorder
from praxis_tools.stuck.progress_history import ProcessHistory
from praxis_tools.stuck.stuck_report import paragraph
from tests.support.job_runs import CHECKOUT

INF = math.inf


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of a main thread: what it is, how long it takes, and what can be seen of it."""

    doing: str
    seconds: float
    cores: float = 1.0
    state: str = "S"
    bytes_per_second: int = 0
    is_heard: bool = True
    sign_every: float = INF  # Seconds between two signs of life.


@dataclasses.dataclass(frozen=True)
class Place:
    """A place at which all processes meet, and the work of one of them before it.

    A place of the devices is left when that before is over there; a barrier when all have come.
    """

    works: Sequence[Work]
    device_seconds: float = 0.1
    is_barrier: bool = False


class Process:
    """A simulated process: its main thread notes what it does as that of a real one."""

    def __init__(self, index: int, place_of: Callable[[int, int], Place | None], speed: float):
        self.index, self.place_of, self.speed, self.now = index, place_of, speed, 0.0
        self.noted = ProgressRecorder(lambda: self.now)
        self.num_left, self.spent, self.cpu, self.io = 0, 0.0, 0.0, 0.0
        self.state, self.heard_at, self.arrived_at = "S", 0.0, [0.0]
        self.enter(0)

    def enter(self, number: int) -> None:
        self.place = self.place_of(self.index, number)
        self.works = list(self.place.works)

    def run(self, seconds: float, is_over: Callable[[int, float], bool]) -> None:
        """Lives for some seconds."""
        end, self.heard = self.now + seconds, True
        self.cpu += 0.01 * seconds  # Its own threads.
        while self.now < end:
            if self.works:
                self.work(self.works[0], end)
            elif is_over(len(self.arrived_at) - 1 - (not self.place.is_barrier), self.now):
                self.noted.record_sign_of_life()
                self.enter(len(self.arrived_at) - 1)
            else:
                self.state = "S"
                doing = f"{self.place.works[-1].doing}{ON_DEVICES}"
                self.noted.start_activity(MEETING if self.place.is_barrier else doing)
                self.now = end
        if self.heard:
            self.heard_at = self.now

    def work(self, work: Work, end: float) -> None:
        self.noted.start_activity(work.doing)
        self.state, self.heard = work.state, work.is_heard
        used = min(end - self.now, work.seconds * self.speed - self.spent)
        if self.spent // work.sign_every != (self.spent + used) // work.sign_every:
            self.noted.record_sign_of_life()
        self.cpu, self.io = self.cpu + used * work.cores, self.io + used * work.bytes_per_second
        self.spent, self.now = self.spent + used, self.now + used
        if self.spent >= work.seconds * self.speed - 1e-9:
            self.works.pop(0)
            self.spent = 0.0
            if not self.works:
                self.noted.reach_sync_point(dispatched=len(self.arrived_at))
                self.arrived_at.append(self.now)

    def progress(self) -> Progress:
        return dataclasses.replace(
            self.noted.progress_of(self.index),
            unheard_seconds=self.now - self.heard_at,
            cpu_seconds=round(self.cpu, 2),
            io_bytes=int(self.io),
            state=self.state,
        )


def verdict_on(
    place_of: Callable[[int, int], Place],
    num: int,
    seconds: float,
    seed: int = 0,
    speeds: Sequence[float] = (),
    stalls: Sequence[tuple[float, float]] = (),
) -> tuple[Stuck | None, float]:
    """Returns the first verdict on so many processes, and how long they had waited for it.

    Args:
      place_of: the places of a process, by its index and their number.
      seconds: how long the processes live.
      stalls: when the observer itself is stopped, and for how long.
    """
    chance = random.Random(seed)
    processes = [Process(k, place_of, speeds[k] if speeds else 1.0) for k in range(num)]
    decision, over, now, next_look = Decision(num), [0.0], 0.0, 0.0

    def is_over(number: int, now: float) -> bool:
        """Returns True if the devices have ended a place, or nobody is missing at a barrier."""
        while len(over) <= number and all(len(item.arrived_at) > len(over) for item in processes):
            last = max(item.arrived_at[len(over)] for item in processes)
            over.append(max(last, over[-1]) + place_of(0, len(over) - 1).device_seconds)
        return number < len(over) and over[number] <= now

    while now < seconds:
        now += 0.25
        for process in processes:
            process.run(now - process.now, is_over)
        if now >= next_look and not any(at <= now < at + long for at, long in stalls):
            next_look = now + chance.uniform(0.8, 2.2)
            # A beat is lost now and then.
            seen = [item.progress() for item in processes if chance.random() > 0.05]
            result = decision.add(now, seen)
            if result is not None:
                return result, now - max(item.arrived_at[-1] for item in processes)
    return None, now


def steps(
    *works: Work, device_seconds: float = 0.5, special: Callable = lambda k, n: None
) -> Callable[[int, int], Place]:
    """Returns the places of a training: a compile, steps, and what `special` says of some."""

    def place_of(process: int, number: int) -> Place | None:
        result = special(process, number)
        if result is not None:
            return result
        if number == 0:
            return Place([Work("init", 4.0), Work("compile", 20.0)], 0.1, is_barrier=True)
        return Place(works, device_seconds)

    return place_of


INPUT, STEP = Work("input wait", 0.2), Work("step", 0.1)
NORMAL = (INPUT, STEP)


def at(process: int | None, number: int, *works: Work, **settings) -> Callable:
    """Returns the special work of a process (None: of all) before a place."""
    return lambda k, n: (
        Place(works, **{"device_seconds": 0.5, **settings})
        if n == number and (process is None or k == process)
        else None
    )


def barrier_at(number: int, first: Sequence[Work], others: Sequence[Work]) -> Callable:
    return lambda k, n: Place(others if k else first, 0.0, is_barrier=True) if n == number else None


NOBODY = {
    "a training": steps(*NORMAL),
    "a compile of 10 minutes, faster on some": steps(
        *NORMAL,
        special=lambda k, n: (
            Place([Work("compile", 600.0 - 200 * k)], 0.1, is_barrier=True) if n == 0 else None
        ),
    ),
    "a compile of an evaluation in one process": steps(
        *NORMAL, special=at(1, 40, Work("compile", 200.0))
    ),
    "steps of four minutes": steps(*NORMAL, device_seconds=240.0),
    "a first step that is slow": steps(*NORMAL, special=at(None, 1, STEP, device_seconds=400.0)),
    "an evaluation of long batches after quick steps": steps(
        *NORMAL,
        special=lambda k, n: (
            Place([Work("evaluation", 0.1)], 90.0, is_barrier=n == 39) if 30 <= n < 40 else None
        ),
    ),
    "a slow save of the first process, at work": steps(
        *NORMAL, special=barrier_at(30, [Work("save", 900.0, cores=0.3)], [Work("save", 1.0)])
    ),
    "a slow save that waits for the disk": steps(
        *NORMAL,
        special=barrier_at(30, [Work("save", 1000.0, cores=0.0, state="D")], [Work("save", 1.0)]),
    ),
    "a slow save that waits for another process": steps(
        *NORMAL, special=barrier_at(30, [Work("save", 400.0, cores=0.0)], [Work("save", 1.0)])
    ),
    "a slow restore that reads without much work": steps(
        *NORMAL,
        special=barrier_at(
            0,
            [Work("restore", 900.0, cores=0.01, bytes_per_second=10**6)],
            [Work("restore", 3.0)],
        ),
    ),
    "an input pipeline at work for 100 s a batch in one process": lambda k, n: Place(
        [Work("input wait", 100.0 if k == 1 else 0.1), STEP]
    ),
    "an input pipeline that waits for 25 s a batch in one process": lambda k, n: Place(
        [Work("input wait", 25.0 if k == 1 else 0.1, cores=0.0), STEP]
    ),
    "an input pipeline that waits longer and longer": lambda k, n: Place(
        [Work("input wait", 15.0 + min(3 * n, 90) if k == 1 else 0.1, cores=0.0), STEP]
    ),
    "one hook of the first process works for four minutes": steps(
        *NORMAL, special=at(0, 100, Work("hook Bleu", 240.0))
    ),
    "a hook waits for a service, and gives signs of life": steps(
        *NORMAL, special=at(0, 100, Work("hook Upload", 400.0, cores=0.0, sign_every=20.0))
    ),
    "C code keeps Python's lock for 20 s": steps(
        *NORMAL, special=at(1, 50, Work("input wait", 20.0, is_heard=False))
    ),
    "C code keeps Python's lock for two minutes of a compile": steps(
        *NORMAL, special=at(1, 0, Work("compile", 120.0, is_heard=False), is_barrier=True)
    ),
    "a process is stopped for 3 s": steps(
        *NORMAL, special=at(1, 50, Work("step", 3.0, cores=0.0, state="T", is_heard=False))
    ),
}


@pytest.mark.parametrize("name", NOBODY)
def test_nobody_is_stuck(name):
    actual, when = verdict_on(NOBODY[name], 3, 1500.0)
    assert actual is None, (when, actual)


def test_processes_of_very_different_speed_are_not_stuck():
    actual, when = verdict_on(
        steps(INPUT, Work("step", 2.0)), 4, 1000.0, speeds=(1.0, 0.1, 5.0, 9.0)
    )
    assert actual is None, (when, actual)


def test_an_observer_that_was_stopped_itself_blames_nobody():
    actual, _ = verdict_on(
        steps(*NORMAL), 3, 800.0, stalls=((100.0, 100.0), (300.0, 60.0), (450.0, 300.0))
    )
    assert actual is None, actual


HANGS = {
    "its input pipeline": Work("input wait", INF, cores=0.0),
    "its input pipeline, with a dead file system": Work("input wait", INF, cores=0.0, state="D"),
    "a hook": Work("hook Mine", INF, cores=0.0),
    "C code that keeps Python's lock and sleeps": Work("step", INF, cores=0.0, is_heard=False),
    "C code that keeps Python's lock and works": Work("step", INF, cores=1.0, is_heard=False),
    "a loop without end": Work("input wait", INF),
    "stopped": Work("step", INF, cores=0.0, state="T", is_heard=False),
    "stopped in a compile": Work("compile", INF, cores=0.0, state="T", is_heard=False),
    "stopped in a save": Work("save", INF, cores=0.0, state="T", is_heard=False),
    "a compile without work": Work("compile", INF, cores=0.0),
    "a restore without work": Work("restore", INF, cores=0.0),
    # Also of one that stopped soon after a save: its last report is of the save.
    "C code that keeps Python's lock and sleeps, in a save": Work(
        "save", INF, cores=0.0, is_heard=False
    ),
}


@pytest.mark.parametrize("culprit", [0, 2])
@pytest.mark.parametrize("name", HANGS)
def test_a_process_that_hangs_is_named_within_60_s(name, culprit):
    actual, waited = verdict_on(steps(*NORMAL, special=at(culprit, 61, HANGS[name])), 3, 200.0)
    assert [item.process for item in actual.processes] == [culprit]
    assert [item.process for item in actual.waiting] == [k for k in range(3) if k != culprit]
    assert actual.processes[0].doing == HANGS[name].doing and actual.processes[0].arrived == 61
    assert 3.0 < waited < (10.0 if "stopped" in name else 42.0), (waited, actual)
    if "stopped" in name:
        assert "stopped by a signal" in actual.why
    elif "keeps" in name:
        assert "C code" in actual.why


def test_two_that_hang_at_one_place_are_both_named():
    place_of = steps(
        *NORMAL, special=lambda k, n: Place([HANGS["a hook"]]) if n == 50 and k in (1, 3) else None
    )
    actual, _ = verdict_on(place_of, 4, 200.0)
    assert [item.process for item in actual.processes] == [1, 3]
    assert [item.process for item in actual.waiting] == [0, 2]


def test_one_that_may_wait_for_another_is_not_blamed_while_that_one_works():
    # Both are behind; the first of them compiles, and the second sleeps until it has.
    place_of = steps(
        *NORMAL,
        special=lambda k, n: (
            {1: Place([Work("compile", 300.0)]), 2: Place([Work("compile", 300.0, cores=0.0)])}.get(
                k
            )
            if n == 50
            else None
        ),
    )
    actual, when = verdict_on(place_of, 3, 500.0)
    assert actual is None, (when, actual)


@pytest.mark.parametrize("doing", ["step", "evaluation"])
def test_devices_that_end_no_step_are_no_process_s_fault(doing):
    place_of = steps(
        *NORMAL,
        special=lambda k, n: (
            Place([Work(doing, 0.1)], INF if n == 60 else 0.1) if n >= 50 else None
        ),
    )
    actual, when = verdict_on(place_of, 3, 300.0)
    assert actual.processes == () and len(actual.waiting) == 3
    assert "a device, or a link between devices, is stuck" in actual.why
    assert 60.0 < actual.seconds < 70.0


def test_processes_that_all_wait_at_one_place_for_their_data_are_not_the_devices_fault():
    actual, _ = verdict_on(
        steps(*NORMAL, special=at(None, 60, HANGS["its input pipeline"])), 3, 300.0
    )
    assert actual.processes == () and "input wait" in actual.why and "device" not in actual.why


def random_history(seed: int) -> tuple[Callable, int, list[float]]:
    """Returns the places of a clean random training, the number of processes, and their speeds."""
    draw = random.Random(seed)
    num = draw.choice([2, 3, 5, 8])
    work, wait = draw.choice([0.01, 0.3, 2.0, 10.0]), draw.choice([0.01, 0.1, 1.0, 8.0])
    device = draw.choice([0.05, 1.0, 20.0, 150.0])
    eval_every, save_every = draw.choice([7, 13, 29]), draw.choice([5, 11, 31])
    first_save, is_idle_save = draw.choice([0.1, 5.0, 100.0]), draw.random() < 0.5
    compile_seconds = draw.choice([3.0, 60.0, 400.0])

    def place_of(process: int, number: int) -> Place:
        local = random.Random(seed * 10**6 + number * 100 + process)
        factor = local.lognormvariate(0.0, 0.3)
        if number == 0:
            works = [Work("import", 5.0 * factor), Work("compile", compile_seconds * factor)]
            return Place(works, 0.1, is_barrier=True)
        if number % save_every == 0:
            write = Work("save", first_save, cores=0.0 if is_idle_save else 0.5)
            return Place(
                [Work("save", 0.2), *([write] if process == 0 else [])], 0.0, is_barrier=True
            )
        if number % eval_every < 2:
            return Place([Work("evaluation", 0.3 * work * factor)], device / 3)
        return Place(
            [
                Work("input wait", wait * factor, cores=local.choice([0.02, 1.0])),
                Work("step", work * factor),
            ],
            device,
        )

    return place_of, num, [draw.choice([0.5, 1.0, 1.0, 2.0]) for _ in range(num)]


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 20))]
)
def test_in_random_trainings_the_planted_culprit_is_named_and_nobody_else(seed):
    place_of, num, speeds = random_history(seed)
    clean, when = verdict_on(place_of, num, 1500.0, seed=seed, speeds=speeds)
    assert clean is None, (when, clean)
    draw = random.Random(-seed)
    culprit, number = draw.randrange(num), draw.randrange(5, 40)
    hang = HANGS[draw.choice([name for name in HANGS if "loop" not in name])]

    def planted(process, n):
        return Place([hang]) if (process, n) == (culprit, number) else place_of(process, n)

    actual, waited = verdict_on(planted, num, 20_000.0, seed=seed, speeds=speeds)
    assert [item.process for item in actual.processes] == [culprit]
    assert actual.processes[0].arrived == number
    # Three times its slowest work so far, if that was slow.
    usual = actual.processes[0].usual_seconds or 0.0
    assert waited < max(45.0, 3 * usual + 5.0), (waited, actual)


def test_the_paragraph_says_who_where_and_in_what_the_others_wait():
    culprit = Progress(process=1, doing="input wait", step=12, dispatched=12, arrived=20)
    other = Progress(process=0, doing=f"step{ON_DEVICES}", step=12, dispatched=13, arrived=21)

    def words(culprit, other):
        stuck = Stuck((culprit,), 36.0, (other,), "no sign of life for 36 s")
        return paragraph(stuck, "process {} (host)".format, "all-reduce for {}".format)

    assert words(culprit, other) == (
        "process 1 (host) is stuck: no sign of life for 36 s; it has completed step 12 and is in: "
        "input wait; process 0 (host) waits for it for 36 s, in step 13's first collective that "
        "needs its devices: all-reduce for 1"
    )
    # Nothing is said of a collective where it is not known that they wait in it.
    at_work = dataclasses.replace(other, doing="hook Mine")
    assert words(culprit, at_work).endswith("for 36 s, in: hook Mine")
    meeting = dataclasses.replace(other, doing=MEETING, dispatched=12)
    assert words(culprit, meeting).endswith("for 36 s, at a barrier on the hosts")
    begun = dataclasses.replace(culprit, doing=f"step{ON_DEVICES}", dispatched=13)
    assert words(begun, other).endswith(
        "its own devices to finish step 13; process 0 (host) waits for it for 36 s"
    )
    unheard = dataclasses.replace(culprit, unheard_seconds=20.0)
    assert words(unheard, other).endswith(
        "according to its last report, it has completed step 12 and is in: input wait; process 0 "
        "(host) waits for it for 36 s; process 0 (host): it has completed step 12 and waits for "
        "its own devices to finish step 13; a step's first collective that needs the stuck "
        "process's devices: all-reduce for 1"
    )


def test_the_state_and_work_of_another_process_are_read_and_its_stacks_given_when_asked():
    # `pause` by PyDLL keeps Python's lock: no thread of Python runs.
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import ctypes\n"
            "from praxis_lite.job.processes.stacks import install_stacks_handler\n"
            "sum(range(10**7))\n"
            "print(install_stacks_handler(), flush=True)\n"
            "while True: ctypes.PyDLL(None).pause()\n",
        ],
        stdout=subprocess.PIPE,
        text=True,
        cwd=CHECKOUT,
    )
    try:
        path = child.stdout.readline().strip()
        report = {"doing": "step", "arrived": 7, "silent_seconds": 1.0}
        progress = progress_of_pid(child.pid, report, 3, unheard_seconds=2.0)
        assert (progress.process, progress.doing, progress.arrived) == (3, "step", 7)
        assert progress.silent_seconds == 3.0 and progress.state in "RS"
        assert progress.cpu_seconds > 0.05 and progress.io_bytes > 10_000
        stacks = request_stacks(child.pid, path, seconds=20.0)
        assert re.search(r'File "<string>", line [45] in <module>', stacks), stacks
        child.send_signal(signal.SIGSTOP)
        while progress_of_pid(child.pid, report, 3, 0.0).state != "T":
            time.sleep(0.01)
        assert describe_state(child.pid).startswith("it is stopped by a signal (state T)")
        assert request_stacks(child.pid, path, seconds=0.3) == ""
    finally:
        child.kill()
        child.communicate()
    assert describe_state(child.pid) == ""


def why_of(ready_seconds: Callable[[int], float]) -> str:
    """Returns why a process is stuck that sleeps for 36 s, as its host tells every second."""
    history = ProcessHistory()
    for second in range(37):
        history.add(
            Progress(
                process=0,
                arrived=7,
                step=12,
                doing="input wait",
                silent_seconds=float(second),
                state="S",
                usual_seconds=0.1,
                ready_seconds=ready_seconds(second),
            ),
            float(second),
        )
    history.behind_since = 0.0
    return history.why_stuck(36.0)


def test_a_thread_that_was_missed_once_is_no_work_and_one_that_waits_for_a_core_is():
    # A host with too few cores: a thread is ready all the time, or half of it.
    assert why_of(lambda second: 1.0 * second).startswith("at work for 36 s")
    assert why_of(lambda second: 0.5 * second).startswith("at work for 36 s")
    assert why_of(lambda second: 0.0).startswith("no sign of life")
    # A list of threads without the one that compiled for 40 s, at any time.
    for missed in range(37):
        why = why_of(lambda second, missed=missed: 0.0 if second == missed else 40.0)
        assert why.startswith("no sign of life"), missed
