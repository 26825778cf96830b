"""Supervisors over pretended workers, hosts and clocks: thousands of events without a process."""

import itertools
import json
import random
import signal
import types

import pytest

from praxis_lite.core.errors import ConfigError
from praxis_lite.host import object_stores
from praxis_lite.host.file_reading import lines_of
from praxis_lite.host.object_stores import StorePath, StoreUnreachable
from praxis_lite.job.job_dir import JobDir, StoredJobDir
from praxis_lite.job.mirror import Mirror
from praxis_lite.job.processes import signals
from praxis_tools.elastic import (
    leader,
    liveness,
    stuck_workers,
    supervisor,
    worker_process,
)
from praxis_tools.elastic.leader import Settings
from praxis_tools.elastic.members import Rendezvous
from praxis_tools.elastic.supervisor import Supervisor
from praxis_tools.elastic.worker_assignment import LOST_PEER_STATUS
from praxis_tools.stuck.progress import Progress

TICK = 0.25
EVENTS = ("kill_host", "kill_worker", "stop_worker", "stop_host", "leave", "start", "wake")
START_TICKS, SAVE_EVERY = 8, 5


class Clock:
    """A module `time` whose seconds pass when the test says so.

    Attributes:
      ahead: by how much the clocks of the host whose code runs are ahead.
    """

    def __init__(self):
        self.seconds, self.ahead = 100_000.0, 0.0

    def monotonic(self):
        return self.seconds + self.ahead

    def time(self):
        return self.seconds + self.ahead + 1e9

    def strftime(self, form):
        return "today"


class PretendedWorker:
    """A worker that steps together with the others of its generation, and ends with them."""

    world = None

    def __init__(self, argv):
        self.reports, self.phases, self.first_step_time = {}, [], None
        self.order, self.code, self.age = None, None, 0
        self.is_asked = self.is_stopped = False

    pid = 1

    def assign(self, order):
        self.order = order
        self.phases.append(("start", self.world.clock.monotonic()))
        self.world.workers.append(self)

    def read_reports(self):
        pass

    def progress(self, index):
        state = "T" if self.is_stopped else "R"
        arrived = self.reports.get("made", 0) + 1 - self.is_stopped
        return Progress(process=index, doing="step", state=state, arrived=arrived)

    def status(self):
        return self.code

    def ask_to_stop(self):
        self.is_asked = True

    def kill(self):
        self.code = -9 if self.code is None else self.code


class World:
    """Hosts, each with a supervisor that may be there, be stopped, or be gone."""

    def __init__(self, job, monkeypatch, num_members, *, min_members=1, num_steps=10**9, skew=0.0):
        self.skew = skew  # Of each host to the one before.
        self.clock, self.job, self.num_members = Clock(), job, num_members
        self.num_steps, self.min_members = num_steps, min_members
        self.hosts, self.stopped, self.statuses = {}, set(), {}
        self.workers, self.saved, self.furthest = [], 0, 0
        self.losses = []  # Of each start: the steps that were made before and are made again.
        monkeypatch.setattr(PretendedWorker, "world", self)
        for module in (supervisor, leader, stuck_workers, liveness, worker_process):
            monkeypatch.setattr(module, "time", self.clock)
        monkeypatch.setattr(supervisor, "WorkerProcess", PretendedWorker)
        monkeypatch.setattr(liveness, "refuses_connections", self._refuses)
        monkeypatch.setattr(supervisor.Supervisor, "_check_number_is_free", lambda self: None)

    def _refuses(self, address):
        host = int(address.rpartition(":")[2])
        return host not in self.hosts

    def start(self, k):
        self.clock.ahead = self.skew * k
        item = Supervisor(
            Settings(
                argv=(),
                job=self.job,
                member=k,
                num_members=self.num_members,
                min_members=self.min_members,
                start_seconds=10.0,
                address="127.0.0.1",
            )
        )
        item.join(f"127.0.0.1:{k}", b"key")
        self.hosts[k], self.leaving = item, set()
        self.statuses.pop(k, None)

    def kill_host(self, k):
        self._end_worker_of(k, -9)
        del self.hosts[k]
        self.stopped.discard(k)

    def kill_worker(self, k):
        self._end_worker_of(k, -9)

    def stop_worker(self, k):
        for worker in self.workers:
            worker.is_stopped |= worker.order.member == k and worker.code is None

    def stop_host(self, k):
        self.stopped.add(k)

    def _end_worker_of(self, k, code):
        for worker in self.workers:
            if worker.order.member == k and worker.code is None:
                worker.code = code

    def leave(self, k):
        self.hosts[k].leave()

    def tick(self):
        self.clock.seconds += TICK
        for k in list(self.hosts):
            if k in self.stopped:
                continue
            self.clock.ahead = self.skew * k
            try:
                status = self.hosts[k].poll()
            except StoreUnreachable:  # `Supervisor.run` retries too.
                status = None
            except ConfigError:
                status = 2
            if status is not None:
                self.hosts[k].close()
                self._end_worker_of(k, -9)
                del self.hosts[k]
                self.statuses[k] = status
        self.clock.ahead = 0.0
        self._step()

    def _step(self):
        generations = {}
        for worker in self.workers:
            generations.setdefault(worker.order.generation, []).append(worker)
        for workers in generations.values():
            order = workers[0].order
            alive = [w for w in workers if w.code is None]
            if not alive:
                continue
            if len(workers) < len(order.members):
                continue  # They connect.
            if len(alive) < len(workers):
                for worker in alive:
                    if worker.order.member not in self.stopped:
                        worker.code = LOST_PEER_STATUS
                continue
            if any(w.is_stopped or w.order.member in self.stopped for w in workers):
                continue  # They wait in a collective.
            workers[0].age += 1
            if workers[0].age < START_TICKS:
                continue
            self._make_step(workers)

    def _make_step(self, workers):
        if workers[0].age == START_TICKS:
            self.losses.append(self.furthest - self.saved)
            self.at = self.saved
            for worker in workers:
                worker.reports["from_step"] = self.at
        self.at += 1
        self.furthest = max(self.furthest, self.at)
        for worker in workers:
            worker.reports["made"] = self.at
            self.clock.ahead = self.skew * worker.order.member
            worker.first_step_time = worker.first_step_time or self.clock.monotonic()
        is_over = self.at >= self.num_steps
        if self.at % SAVE_EVERY == 0 or is_over or any(w.is_asked for w in workers):
            self.saved = self.at
        if is_over or any(w.is_asked for w in workers):
            for worker in workers:
                worker.reports["ended"] = "trained" if is_over else "stopped"
                worker.code = 0

    def until(self, condition, seconds=120.0):
        ticks = itertools.count()
        while not condition():
            self.tick()
            assert next(ticks) * TICK < seconds, self.story()

    def works_with(self, members):
        """Returns True if these members step together in the newest generation."""
        newest = Rendezvous(self.job.elastic).newest_generation()
        there = [
            w
            for w in self.workers
            if w.order.generation == newest and w.code is None and w.first_step_time
        ]
        numbers = {w.order.member for w in there}
        return bool(there) and numbers == set(members) == set(there[0].order.members)

    def story(self):
        return "\n".join(self.lines()) + f"\nhosts {sorted(self.hosts)} stopped {self.stopped}"

    def lines(self):
        return lines_of(self.job.elastic.parent / "elastic.jsonl")

    def kinds(self):
        return [json.loads(line)["kind"] for line in self.lines()]


@pytest.fixture
def job(request, tmp_path):
    """The job's directory, or a folder in an object store if the test asks for it."""
    if getattr(request, "param", "disk") == "disk":
        return JobDir(tmp_path)
    pytest.importorskip("obstore")
    object_stores._bucket.cache_clear()
    return StoredJobDir(tmp_path, Mirror(StorePath.opened("memory://bucket/job"), tmp_path))


on_disk_and_in_a_store = pytest.mark.parametrize("job", ["disk", "store"], indirect=True)
in_a_store = pytest.mark.parametrize("job", ["store"], indirect=True)


@pytest.fixture
def world(job, monkeypatch):
    """Returns a function that makes a world."""
    return lambda n, **settings: World(job, monkeypatch, n, **settings)


@pytest.fixture
def working(world):
    """Returns a function that makes a world in which all hosts train together."""

    def make(n, **settings):
        w = world(n, **settings)
        for k in range(n):
            w.start(k)
        w.until(lambda: w.works_with(range(n)))
        return w

    return make


@on_disk_and_in_a_store
@pytest.mark.parametrize("skew", [0.0, 3600.0, -3600.0])
def test_all_hosts_that_die_or_come_back_are_followed_whatever_their_clocks(working, skew):
    w = working(4, skew=skew)
    w.kill_worker(2)  # Its host has another worker ready.
    w.until(lambda: w.works_with(range(4)))
    w.kill_host(0)
    w.until(lambda: w.works_with([1, 2, 3]))
    w.kill_host(1), w.kill_host(3)
    w.until(lambda: w.works_with([2]))
    for k in (0, 1, 3):
        w.start(k)
    w.until(lambda: w.works_with(range(4)))
    w.leave(2)
    w.until(lambda: w.works_with([0, 1, 3]) and w.statuses == {2: 0})
    w.tick()  # The leader records what came about.
    assert max(w.losses) <= SAVE_EVERY
    assert [k for k in w.kinds() if k != "came"] == ["start", "died", "died", "died", "left"]
    for line in map(json.loads, w.lines()):
        assert 0 <= line["seconds"]["total"] < 60, line


@pytest.mark.parametrize("skew", [0.0, 3600.0, -3600.0])
def test_a_host_whose_worker_ends_twice_before_a_step_rests_half_a_minute(working, skew):
    w = working(3, skew=skew)
    for _ in range(2):  # The first ends after a step.
        before = len(w.workers)
        w.kill_worker(2)
        w.until(lambda n=before: any(x.order.member == 2 for x in w.workers[n:]))
    w.kill_worker(2)
    rests_since = w.clock.seconds
    w.until(lambda: w.works_with([0, 1]), 20)
    w.until(lambda: w.works_with(range(3)), 60)
    assert 28 < w.clock.seconds - rests_since < 40


@pytest.mark.parametrize("skew", [0.0, 3600.0, -3600.0])
def test_processes_that_all_lost_another_begin_again_after_three_seconds(working, skew):
    w = working(3, skew=skew)
    for worker in w.workers:
        worker.code = LOST_PEER_STATUS
    began = w.clock.seconds
    w.until(lambda: len(w.workers) == 6)
    assert 3 <= w.clock.seconds - began < 5


def test_a_leader_that_dies_after_long_is_alone_in_it(working):
    w = working(3)
    for _ in range(200):  # Meanwhile the others look at the leader alone.
        w.tick()
    w.kill_host(0)
    w.until(lambda: w.works_with([1, 2]))
    w.tick()
    last = json.loads(w.lines()[-1])
    assert w.kinds() == ["start", "died"] and last["who"] == [0]
    assert last["seconds"]["notice"] < 5


def test_a_host_that_dies_while_it_joins_does_not_end_the_job(working):
    w = working(3)
    w.kill_host(0)
    w.until(lambda: w.works_with([1, 2]))
    generation = Rendezvous(w.job.elastic).newest_generation()
    w.start(0)
    w.until(lambda: Rendezvous(w.job.elastic).stop_reason(generation))
    w.kill_host(0)
    w.until(lambda: all(worker.code is not None for worker in w.workers))
    w.until(lambda: w.works_with([1, 2]))


def test_a_spare_worker_that_dies_disturbs_nobody(working):
    w = working(2)
    w.until(lambda: w.hosts[1]._spare)
    w.hosts[1]._spare.code = -9
    for _ in range(20):
        w.tick()
    assert w.works_with(range(2)) and w.kinds() == ["start"]
    assert w.hosts[1]._spare is None  # It is replaced later, in case that it cannot start.
    w.until(lambda: w.hosts[1]._spare)
    w.kill_worker(1)
    w.until(lambda: w.works_with(range(2)))


@on_disk_and_in_a_store
def test_a_host_that_is_stopped_is_left_behind_and_takes_part_again_when_it_goes_on(working):
    w = working(3)
    w.stop_host(0)
    w.until(lambda: w.works_with([1, 2]))
    w.stopped.clear()
    w.until(lambda: w.works_with(range(3)))


@on_disk_and_in_a_store
def test_a_worker_that_is_stopped_is_named_and_replaced(working, capfd):
    w = working(3)
    w.stop_worker(1)
    w.until(lambda: "stuck" in w.kinds(), 60)
    change = json.loads(w.lines()[-1])
    assert change["kind"] == "stuck" and change["who"] == [1]
    assert "state T" in change["why"]
    assert b"state T" in w.job.stacks_txt.read_bytes()


def test_the_stacks_of_a_stuck_worker_that_ended_before_it_was_asked_are_those_that_it_told(
    tmp_path, caplog
):
    worker = types.SimpleNamespace(pid=2**22 + 1, reports={"stacks_file": str(tmp_path / "gone")})
    stuck_workers.report_stuck(worker, "process 1 is stuck", tmp_path / "stacks.txt")
    worker.reports["stacks"] = "MainThread:\n  in hang\n"
    stuck_workers.report_stuck(worker, "process 1 is stuck", tmp_path / "stacks.txt")
    for text in ((tmp_path / "stacks.txt").read_text(), "\n".join(["", *caplog.messages])):
        before, after = text.strip().split(" The worker is killed and replaced. ")[1:]
        assert before.startswith("Its stacks are not available: it has ended.\n")
        assert after == "All threads:\nMainThread:\n  in hang"


@in_a_store
def test_a_store_that_cannot_be_reached_for_a_while_disturbs_nobody(working, monkeypatch):
    w = working(3)
    with monkeypatch.context() as patch:
        disconnect(patch)
        for _ in range(80):  # 20 s.
            w.tick()
    for _ in range(80):
        w.tick()
    assert w.works_with(range(3)) and w.kinds() == ["start"]


@in_a_store
def test_a_host_that_cannot_reach_the_store_ends_its_worker_before_it_counts_as_dead(
    working, monkeypatch
):
    w = working(1)
    with monkeypatch.context() as patch:
        disconnect(patch)
        began, (worker,) = w.clock.seconds, w.workers
        w.until(lambda: worker.code is not None)
        assert 20 < w.clock.seconds - began < liveness.IN_STORE.silent
    w.until(lambda: w.works_with([0]))


def disconnect(patch):
    def fail(self, action, request):
        raise StoreUnreachable("The store cannot be reached.")

    patch.setattr(StorePath, "_retried", fail)


def test_with_fewer_than_min_processes_it_waits(working):
    w = working(3, min_members=2)
    w.kill_host(1), w.kill_host(2)
    before = w.at
    for _ in range(200):
        w.tick()
    assert w.at == before
    w.start(2)
    w.until(lambda: w.works_with([0, 2]))


def test_the_end_of_training_ends_all_with_its_status(world):
    w = world(3, num_steps=40)
    for k in range(3):
        w.start(k)
    w.until(lambda: not w.hosts)
    assert w.statuses == {0: 0, 1: 0, 2: 0}
    assert w.at == 40


def test_a_signal_to_all_ends_the_job(working):
    w = working(3)
    for k in range(3):
        w.leave(k)
    w.until(lambda: not w.hosts)
    assert w.statuses == {0: 0, 1: 0, 2: 0}
    assert w.saved == w.at


def test_an_error_of_the_users_ends_the_job_the_second_time(working):
    w = working(2)

    def fail():
        for worker in w.workers:
            if worker.order.member == 1 and worker.code is None:
                worker.reports["why"], worker.code = "ended with status 1: KeyError: 'x'", 1

    fail()
    w.until(lambda: len([x for x in w.workers if x.code is None]) == 2)
    fail()
    w.until(lambda: not w.hosts)
    assert w.statuses == {0: 1, 1: 1}


def test_a_wrong_command_line_ends_all_with_status_2(world, monkeypatch):
    w = world(2)
    w.start(0), w.start(1)
    w.tick()
    w.hosts[1]._spare.code = 2
    w.until(lambda: not w.hosts)
    assert w.statuses == {0: 2, 1: 2}


@on_disk_and_in_a_store
@pytest.mark.parametrize(
    ("seed", "num_events"),
    [
        (0, 8),
        pytest.param(1, 60, marks=pytest.mark.slow),
        *(pytest.param(seed, 60, marks=pytest.mark.nightly) for seed in range(2, 7)),
    ],
)
def test_random_histories_lose_at_most_an_interval_and_always_go_on(working, seed, num_events):
    rng, w = random.Random(seed), working(5)
    for _ in range(num_events):
        for _ in range(rng.choice((1, 1, 1, 2))):
            working = [k for k in w.hosts if k not in w.stopped]
            absent = [k for k in range(5) if k not in w.hosts]
            event = rng.choice(EVENTS)
            if event == "start" and absent:
                w.start(rng.choice(absent))
            elif event == "wake":
                w.stopped.clear()
            elif event not in ("start", "wake") and len(working) > 1:
                getattr(w, event)(rng.choice(working))
        for _ in range(rng.randrange(60)):  # The next may come in the middle of what follows.
            w.tick()
    w.stopped.clear()
    for _ in range(200):
        w.tick()
    for k in range(5):
        if k not in w.hosts:
            w.start(k)
    w.until(lambda: w.works_with(range(5)), 300)
    assert max(w.losses) <= SAVE_EVERY, w.losses
    numbers = [json.loads(line)["generation"] for line in w.lines()]
    assert len(set(numbers)) == len(numbers)


def test_the_end_of_a_worker_is_told_from_its_status():
    end = worker_process.classify_end
    assert end(0, {"ended": "trained"}, was_asked=False).kind == "trained"
    assert end(LOST_PEER_STATUS, {"ended": "trained"}, was_asked=False).kind == "trained"
    assert end(-signal.SIGABRT, {"ended": "stopped"}, was_asked=True).status == 0
    unsound = end(3, {}, was_asked=False)
    assert (unsound.kind, unsound.status) == ("trained", 3)
    assert end(-signal.SIGKILL, {}, was_asked=True).why == "was killed by SIGKILL"
    assert end(128 + signals.STOPS_WORKER, {}, was_asked=True).kind == "stopped"
    assert end(LOST_PEER_STATUS, {}, was_asked=False).kind == "lost peer"
    assert end(1, {"why": "ended with status 1: x"}, was_asked=False).kind == "failed"
    assert worker_process.WorkerProcess is not PretendedWorker
