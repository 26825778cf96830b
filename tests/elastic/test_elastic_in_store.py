"""Tests that an elastic job in an object store survives failures like a job on disk."""

import dataclasses
import json

import pytest

from praxis_lite.host.file_reading import lines_of
from praxis_lite.host.object_stores import StorePath
from praxis_tools.elastic.members import Rendezvous
from tests.elastic import verdict
from tests.elastic.chaos import PEER_STEPS, SURVIVE_SECONDS, settings_of, undisturbed
from tests.elastic.hosts import Hosts, wait_for
from tests.elastic.test_elastic import DISK_STEPS, LAST_STEPS, SMALLER
from tests.faults.outcome import last_step
from tests.support.fake_s3 import s3_bucket

pytestmark = pytest.mark.nightly


def test_an_elastic_job_in_a_store_ends_as_an_undisturbed_one_on_disk(tmp_path):
    settings = settings_of(tmp_path, 2, 1, 1, *SMALLER, disk_steps=DISK_STEPS)
    with s3_bucket() as url:
        job = StorePath.opened(f"{url}/jobs/elastic")
        with Hosts(dataclasses.replace(settings, url=str(job))) as hosts:
            train_with_failures(hosts, job)
        for name in job.files():
            (job / name).download(settings.job / name)
        assert (job / ".training").read_bytes() == b"{}"
    lines = verdict.changes(settings.job)
    assert [line["generation"] for line in lines] == [1, 2, 3, 4, 5, 6, 7, 8]
    kinds = ["start", "died", "stuck", "died", "came", "died", "came", "start"]
    assert [line["kind"] for line in lines] == kinds
    assert [line["members"] for line in lines] == [
        *([[0, 1]] * 3),
        *([[1], [0, 1]] * 2),
        [0, 1],
    ]
    assert (settings.job / "stacks.txt").read_text().count("stuck: process 1 (") == 1
    whole = tmp_path / "undisturbed"
    undisturbed(settings, last_step(settings.job), whole)
    rows = verdict.verdict(
        settings.job, whole, peer_steps=PEER_STEPS, disk_steps=DISK_STEPS, env=settings.env(1)
    )
    assert [failure for row in rows for failure in row.failures] == []
    assert all(row.tried for row in rows)


def train_with_failures(hosts: Hosts, job: StorePath) -> None:
    """Trains until workers and the first host, which holds the lease, were killed and stopped."""

    def trains(generation: int, members: tuple[int, ...]) -> None:
        """Waits until a generation has these members, and has made peer saves."""

        def has_saved() -> bool:
            rendezvous = Rendezvous(job / "elastic")
            first = rendezvous.read(members[0])
            return (
                rendezvous.newest_generation() == generation
                and rendezvous.generation(generation).members == members
                and first is not None
                and first.generation == generation
                and "made" in first.worker
                and first.worker["made"] > first.worker["from_step"] + 2 * PEER_STEPS
            )

        assert wait_for(has_saved, SURVIVE_SECONDS, 0.5), [
            host.log.read_text(errors="replace")[-3000:] for host in hosts.hosts
        ]

    def end(status: int) -> None:
        wait_for(lambda: not hosts.running(), SURVIVE_SECONDS)
        assert [host.status for host in hosts.hosts] == [status] * 2, [
            host.log.read_text(errors="replace")[-3000:] for host in hosts.hosts
        ]

    for host in hosts.hosts:
        host.start()
    trains(1, (0, 1))
    hosts[0].kill_worker()
    trains(2, (0, 1))
    hosts[1].stop_worker()
    trains(3, (0, 1))
    hosts[0].kill()
    trains(4, (1,))
    hosts[0].start()
    trains(5, (0, 1))
    hosts[0].stop()
    trains(6, (1,))
    hosts[0].go_on()
    trains(7, (0, 1))
    for host in hosts.hosts:
        host.ask_to_leave()
    end(0)
    last = json.loads(lines_of(job / "metrics.jsonl")[-1])["step"]
    for host in hosts.hosts:
        host.start(f"run.num_train_steps={last + LAST_STEPS}")
    end(0)
