"""A job that loses its hosts is the same run. `make chaos` has a hundred events."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.elastic import verdict
from tests.elastic.chaos import SURVIVE_SECONDS, Chaos, judged, settings_of
from tests.elastic.events import COMPILE, EVALUATION, RESTORE, SAVE
from tests.elastic.hosts import Hosts, wait_for
from tests.faults.outcome import Row

# It launches processes on two cores.
pytestmark = pytest.mark.slow

@dataclasses.dataclass(frozen=True)
class History:
    """A job to which much happened, and has ended.

    Attributes:
      rows: of the verdict.
      members: the hosts that went on after each part of the history, by its name.
      changes: their lines in elastic.jsonl, by the same names.
      log: what all hosts printed.
      alone: what the undisturbed run printed.
    """

    rows: Sequence[Row]
    members: Mapping[str, list[int]]
    changes: Mapping[str, Mapping[str, Any]]
    log: str
    alone: str


@pytest.fixture(scope="module")
def history(tmp_path_factory):
    """Returns the history of one job, for a launch of its processes takes longer than an event."""
    folder = tmp_path_factory.mktemp("elastic")
    with Hosts(settings_of(folder, members=4, devices=1)) as hosts:
        chaos = Chaos(hosts, folder, seed=3)
        chaos.begin()
        members, changes = {}, {}
        for name, act in acts(chaos):
            assert chaos.happens(act), name
            generation = hosts.generation()
            members[name] = generation["members"]
            # Its line is written after its first step.
            changes[name] = wait_for(
                lambda number=generation["number"]: line_of(hosts, number), SURVIVE_SECONDS
            )
        rows = judged(folder, chaos)
        log = "".join(host.log.read_text(errors="replace") for host in hosts.hosts)
    return History(rows, members, changes, log, (folder / "undisturbed.log").read_text())


def line_of(hosts: Hosts, number: int) -> Mapping[str, Any]:
    """Returns the line of a generation in elastic.jsonl; {} before it is there."""
    lines = verdict.changes(hosts.settings.job)
    return next((line for line in lines if line["generation"] == number), {})


def acts(chaos):
    """Yields what happens in turn, with its name; few come back before others are lost."""
    events = chaos.events
    trains(chaos)
    yield "the worker of one dies", lambda: events.kill_worker(3)
    trains(chaos)
    yield "the first dies", lambda: events.kill_host(0)
    yield "one dies in a save", lambda: events.kill_host_in(SAVE, 1)
    yield "all are back", events.all_come_back
    yield "one dies in an evaluation", lambda: events.kill_host_in(EVALUATION)
    yield "one dies in a restore", lambda: events.kill_host_in(RESTORE)
    yield "one dies in a compilation", lambda: events.kill_host_in(COMPILE)
    yield "all are back again", events.all_come_back
    yield "one hangs", events.stop_host
    yield "it is replaced and wakes", events.replace
    yield "another hangs", events.stop_host
    trains(chaos)
    yield "two die at once", events.kill_two
    yield "the other wakes", events.wake
    trains(chaos)
    yield "one is taken", events.take_host
    yield "all are back at last", events.all_come_back


def trains(chaos: Chaos) -> None:
    """Waits until the job has made so many more steps that it has saves in memory."""
    last = chaos.hosts.step() + 13
    assert wait_for(lambda: chaos.hosts.step() >= last, SURVIVE_SECONDS)


def test_four_devices_three_two_and_four_again(history):
    names = ("the worker of one dies", "the first dies", "one dies in a save", "all are back")
    assert [history.members[name] for name in names] == [[0, 1, 2, 3], [1, 2, 3], [2, 3],
                                                         [0, 1, 2, 3]]
    changes = [history.changes[name] for name in names]
    assert [change["num_devices"] for change in changes] == [4, 3, 2, 4]
    assert [list(change["mesh"].values()) for change in changes] == [
        [1, 2, 2], [1, 3, 1], [1, 1, 2], [1, 2, 2]
    ]


def test_a_job_that_lost_its_hosts_ends_as_an_undisturbed_one(history):
    assert [failure for row in history.rows for failure in row.failures] == []
    assert all(row.tried for row in history.rows)


@pytest.mark.parametrize("name, who", [("the worker of one dies", [3]), ("the first dies", [0])])
def test_what_is_lost_with_one_is_in_the_memory_of_its_neighbour(history, name, who):
    change = history.changes[name]
    assert (change["kind"], change["who"], change["source"]) == ("died", who, "peers")
    assert "restored the peer save of step" in history.log


def test_what_two_neighbours_had_is_restored_from_the_disk(history):
    change = history.changes["two die at once"]
    assert (change["kind"], change["source"]) == ("died", "disk")
    assert len(change["who"]) == 2 and len(change["members"]) == 1
    assert "no host has the part of process" in history.log


def test_a_host_that_hangs_is_left_behind_and_takes_part_again_once_it_is_replaced_or_wakes(
    history
):
    assert len(history.members["one hangs"]) == 3
    assert history.members["it is replaced and wakes"] == [0, 1, 2, 3]
    assert len(history.members["another hangs"]) == 3
    assert len(history.members["the other wakes"]) == 2


def test_a_host_that_is_taken_costs_no_step(history):
    change = history.changes["one is taken"]
    assert (change["kind"], change["lost_steps"]) == ("left", 0)
    assert history.members["all are back at last"] == [0, 1, 2, 3]


def test_a_run_that_is_not_elastic_says_that_it_makes_no_peer_saves(history):
    assert "run.peer_save_every_steps has no effect without --elastic" in history.alone
