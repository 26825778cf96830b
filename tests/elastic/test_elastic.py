"""Tests that an elastic job with host failures has the same results as an undisturbed run.

`make chaos` triggers a hundred events. These include kinds that are not tested here: deaths of
workers alone, deaths while workers connect or compile, and hosts that resume or are restarted.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.elastic import verdict
from tests.elastic.chaos import PEER_STEPS, SURVIVE_SECONDS, Chaos, judged, settings_of
from tests.elastic.events import EVALUATION, RESTORE, SAVE
from tests.elastic.hosts import Hosts, wait_for
from tests.faults.outcome import Row

# These tests launch several processes.
pytestmark = pytest.mark.slow
# A smaller model and shorter intervals than those of `make chaos`. Peer saves and saves on disk
# coincide, so that a death in a save is restored from the memory of the neighbor.
DISK_STEPS, LAST_STEPS = 2 * PEER_STEPS, 3
SMALLER = ("task.model.num_layers=1", f"run.evaluation.every_steps={3 * PEER_STEPS}")


@dataclasses.dataclass(frozen=True)
class History:
    """The history of a finished job.

    Attributes:
      rows: Results of the comparison with the undisturbed run.
      members: Hosts in the generation after each event, keyed by the event's name.
      changes: Lines of these generations in elastic.jsonl, keyed by the event's name.
      stacks: The report of a worker that hung.
      log: Output of all hosts.
      alone: Output of the undisturbed run.
    """

    rows: Sequence[Row]
    members: Mapping[str, list[int]]
    changes: Mapping[str, Mapping[str, Any]]
    stacks: str
    log: str
    alone: str


@pytest.fixture(scope="module")
def history(tmp_path_factory):
    """Returns the history of a job, which is shared because launching its processes is slow."""
    folder = tmp_path_factory.mktemp("elastic")
    settings = settings_of(folder, 3, 1, 1, *SMALLER, disk_steps=DISK_STEPS)
    with Hosts(settings) as hosts:
        chaos = Chaos(hosts, folder, seed=3)
        chaos.begin()
        members, changes = {}, {}
        for name, act in acts(chaos):
            assert chaos.happens(act), name
            generation = hosts.generation()
            members[name] = generation["members"]
            # A generation's line is written after its first step.
            changes[name] = wait_for(
                lambda number=generation["number"]: line_of(hosts, number), SURVIVE_SECONDS
            )
        rows = judged(folder, chaos, disk_steps=DISK_STEPS, num_steps=LAST_STEPS)
        log = "".join(host.log.read_text(errors="replace") for host in hosts.hosts)
    stacks = (settings.job / "stacks.txt").read_text()
    alone = (folder / "undisturbed.log").read_text()
    return History(rows, members, changes, stacks, log, alone)


def line_of(hosts: Hosts, number: int) -> Mapping[str, Any]:
    """Returns the line of a generation in elastic.jsonl, or {} if it is not written yet."""
    lines = verdict.changes(hosts.settings.job)
    return next((line for line in lines if line["generation"] == number), {})


def acts(chaos):
    """Yields the name of each event and the function that triggers the event.

    There are few events, because each regrouping launches a worker per host.
    """
    events = chaos.events
    yield "one blinks", events.blink
    yield "a spare worker dies", events.kill_spare
    trains(chaos)
    yield "the worker of one hangs", lambda: events.hang_worker(2)
    trains(chaos)
    yield "the first dies in a save", lambda: events.kill_host_in(SAVE, 0)
    yield (
        "it returns and one dies in the restore",
        lambda: events.kill_host_in(RESTORE, trigger=events.come_back),
    )
    yield "one hangs", events.stop_host
    yield "it is replaced and wakes", events.replace
    yield "one is taken", events.take_host
    yield "all are back", events.all_come_back
    trains(chaos)
    yield "two die at once in an evaluation", lambda: events.kill_two(EVALUATION)


def trains(chaos: Chaos) -> None:
    """Waits until the job has completed enough steps to have peer saves."""
    last = chaos.hosts.step() + 2 * PEER_STEPS + 1
    assert wait_for(lambda: chaos.hosts.step() >= last, SURVIVE_SECONDS)


def test_the_mesh_follows_the_hosts_that_are_there(history):
    names = (
        "a spare worker dies",
        "the worker of one hangs",
        "the first dies in a save",
        "all are back",
        "two die at once in an evaluation",
    )
    *members, _ = (history.members[name] for name in names)
    assert members == [[0, 1, 2], [0, 1, 2], [1, 2], [0, 1, 2]]
    changes = [history.changes[name] for name in names]
    assert [change["kind"] for change in changes] == ["start", "stuck", "died", "came", "died"]
    assert [change["num_devices"] for change in changes] == [3, 3, 2, 3, 1]
    assert [list(change["mesh"].values()) for change in changes] == [
        [1, 3, 1],
        [1, 3, 1],
        [1, 1, 2],
        [1, 3, 1],
        [1, 1, 1],
    ]


def test_a_job_that_lost_its_hosts_ends_as_an_undisturbed_one(history):
    assert [failure for row in history.rows for failure in row.failures] == []
    assert all(row.tried for row in history.rows)


@pytest.mark.parametrize(
    "name, kind, who",
    [
        ("the worker of one hangs", "stuck", [2]),
        ("the first dies in a save", "died", [0]),
    ],
)
def test_what_is_lost_with_one_is_in_the_memory_of_its_neighbor(history, name, kind, who):
    change = history.changes[name]
    assert (change["kind"], change["who"], change["source"]) == (kind, who, "peers")
    assert "restored the peer save of step" in history.log


def test_a_worker_that_hangs_is_named_and_replaced(history):
    assert re.search(r"stuck: process 2 \(.+\) is stuck: ", history.stacks), history.stacks
    assert "stopped by a signal (state T)" in history.stacks
    assert "Its stacks are not available" in history.stacks
    assert "The worker is killed and replaced." in history.stacks


def test_a_mesh_that_was_seen_compiles_nothing(history):
    change = history.changes["all are back"]
    assert change["compiled"] == 0 < change["programs"]


def test_what_two_neighbors_had_is_restored_from_the_disk(history):
    change = history.changes["two die at once in an evaluation"]
    assert (change["kind"], change["source"]) == ("died", "disk")
    assert len(change["who"]) == 2 and len(change["members"]) == 1
    assert "no host has the part of process" in history.log


def test_a_host_that_hangs_is_left_behind_and_another_in_its_place_takes_part(history):
    # One of the three hosts has been absent since the restore.
    assert len(history.members["it returns and one dies in the restore"]) == 2
    assert len(history.members["one hangs"]) == 1
    assert len(history.members["it is replaced and wakes"]) == 2


def test_a_host_that_is_taken_costs_no_step(history):
    change = history.changes["one is taken"]
    assert (change["kind"], change["lost_steps"]) == ("left", 0)


def test_a_run_that_is_not_elastic_says_that_it_makes_no_peer_saves(history):
    assert "run.peer_save_every_steps has no effect without --elastic" in history.alone
