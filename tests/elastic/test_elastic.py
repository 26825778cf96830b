"""Jobs that lose their hosts are the same runs. `make chaos` has a hundred events."""

import pytest

from tests.elastic.chaos import SURVIVE_SECONDS, Chaos, judged, settings_of
from tests.elastic.events import COMPILE, EVALUATION, RESTORE, SAVE
from tests.elastic.hosts import Hosts, wait_for

# Each launches processes on two cores.
pytestmark = pytest.mark.slow


@pytest.fixture
def chaos_of(tmp_path):
    """Yields a function that begins a job on so many hosts, of so many devices each."""
    begun = []

    def chaos(num_hosts, num_devices):
        hosts = Hosts(settings_of(tmp_path, num_hosts, num_devices))
        begun.append(hosts)
        result = Chaos(hosts, tmp_path, seed=3)
        result.begin()
        return result

    yield chaos
    for hosts in begun:
        hosts.__exit__()


def trains(chaos, num_steps=13):
    """Waits until the job has made so many more steps, and so has saves in memory."""
    last = chaos.hosts.step() + num_steps
    assert wait_for(lambda: chaos.hosts.step() >= last, SURVIVE_SECONDS)


def passes(folder, chaos):
    """Checks that the job ends as an undisturbed one does."""
    rows = judged(folder, chaos)
    assert [failure for row in rows for failure in row.failures] == []
    assert all(row.tried for row in rows)


def test_eight_devices_seven_five_and_eight_again(tmp_path, chaos_of):
    chaos = chaos_of(8, 1)
    events = chaos.events
    trains(chaos)
    assert chaos.happens(events.kill_host)
    assert len(chaos.hosts.generation()["members"]) == 7
    trains(chaos)
    assert chaos.happens(events.kill_two)
    assert len(chaos.hosts.generation()["members"]) == 5
    trains(chaos)
    assert chaos.happens(events.all_come_back)
    assert len(chaos.hosts.generation()["members"]) == 8
    passes(tmp_path, chaos)


def test_a_death_in_any_part_of_a_job_costs_an_interval_at_most(tmp_path, chaos_of):
    chaos = chaos_of(4, 1)
    events = chaos.events
    for phase in (SAVE, EVALUATION, RESTORE, COMPILE):
        assert chaos.happens(lambda phase=phase: events.kill_host_in(phase))
        assert chaos.happens(events.all_come_back)
    assert chaos.happens(events.kill_first)
    assert chaos.happens(events.come_back)
    assert chaos.happens(events.kill_two)
    assert chaos.happens(events.all_come_back)
    passes(tmp_path, chaos)


def test_a_host_that_was_replaced_wakes_and_damages_nothing(tmp_path, chaos_of):
    chaos = chaos_of(3, 1)
    events = chaos.events
    assert chaos.happens(events.stop_host)
    assert chaos.happens(events.replace)
    assert chaos.happens(events.stop_host)
    assert chaos.happens(events.wake)
    assert chaos.happens(events.take_host)
    assert chaos.happens(events.come_back)
    passes(tmp_path, chaos)
