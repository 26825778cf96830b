"""The files of supervisors, on a disk and in an object store."""

import dataclasses
import stat
import threading

import pytest

from praxis_lite import ConfigError
from praxis_lite.host import object_stores
from praxis_lite.host.object_stores import StorePath, StoreUnreachable
from praxis_tools.elastic.generation_log import (
    GenerationRecord,
    append_record,
    read_generation_records,
)
from praxis_tools.elastic.members import Generation, Member, Rendezvous, WorkerEnd

FIRST = Generation(
    number=1,
    kind="start",
    who=(),
    why="all processes are available",
    members=(0, 2),
    incarnations=("a", "c"),
    coordinator="10.0.0.1:7",
    event=1.0,
    noticed=2.0,
    agreed=3.0,
    last_step=0,
)


@pytest.fixture(params=["disk", "store"])
def folder(request, tmp_path):
    if request.param == "disk":
        return tmp_path / "elastic"
    pytest.importorskip("obstore")
    object_stores._bucket.cache_clear()
    return StorePath.opened("memory://bucket/job/elastic")


def test_a_member_is_read_as_it_was_written_last(folder):
    end = WorkerEnd(kind="died", status=-9, why="was killed", time=7.5)
    member = Member(member=3, incarnation="x", beat=5, end=end, phases=(("start", 1.5),))
    Rendezvous(folder).write(dataclasses.replace(member, beat=4))
    Rendezvous(folder).write(member)
    assert Rendezvous(folder).read(3) == member
    assert Rendezvous(folder).read(2) is None
    Rendezvous(folder).remove(3)
    assert Rendezvous(folder).read(3) is None
    Rendezvous(folder).remove(3)


def test_a_damaged_member_is_none(folder):
    rendezvous = Rendezvous(folder)
    (folder / "members" / "0.json").write_bytes(b'{"member": 0')
    assert rendezvous.read(0) is None


def test_only_one_of_seven_members_creates_a_generation_and_all_read_it_and_the_same_key(folder):
    created, keys, start = [], [], threading.Barrier(7)

    def create(k):
        rendezvous = Rendezvous(folder)
        start.wait()
        if rendezvous.create_generation(dataclasses.replace(FIRST, why=str(k))):
            created.append(str(k))
        keys.append(rendezvous.key())

    threads = [threading.Thread(target=create, args=(k,)) for k in range(7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert created == [Rendezvous(folder).generation(1).why]
    assert len(set(keys)) == 1 and len(keys) == 7 and len(keys[0]) == 32
    if not isinstance(folder, StorePath):
        assert stat.S_IMODE((folder / "key").stat().st_mode) == 0o600
        assert sorted(path.name for path in (folder / "generations").iterdir()) == ["1.json"]


def test_the_newest_generation_is_found(folder):
    rendezvous = Rendezvous(folder)
    assert rendezvous.newest_generation() == 0
    for number in (9, 10, 11):
        rendezvous.create_generation(dataclasses.replace(FIRST, number=number))
        rendezvous.request_stop(number, "process 1 joins")
        assert rendezvous.newest_generation() == number
    assert rendezvous.newest_generation(9) == 11
    assert rendezvous.generation(10) == dataclasses.replace(FIRST, number=10)


def test_a_damaged_generation_is_named(folder):
    rendezvous = Rendezvous(folder)
    (folder / "generations" / "4.json").write_bytes(b"{}")
    with pytest.raises(ConfigError, match=r"generations/4\.json is damaged"):
        rendezvous.generation(4)


def test_the_first_reason_to_stop_and_the_first_end_stay(folder):
    rendezvous = Rendezvous(folder)
    assert rendezvous.stop_reason(1) is None and rendezvous.job_end(1) is None
    assert rendezvous.request_stop(1, "process 1 joins")
    assert not rendezvous.request_stop(1, "process 2 joins")
    rendezvous.end_job(1, 0, "trained")
    rendezvous.end_job(1, 1, "failed")
    assert rendezvous.stop_reason(1) == "process 1 joins"
    assert rendezvous.job_end(1) == (0, "trained")
    rendezvous.clear_job_end(1)
    assert rendezvous.job_end(1) is None


def test_records_are_appended_and_sorted(folder):
    fields = dict(time=1.0, kind="start", who=(), why="", members=(0,), reached=True, seconds={})
    records = [GenerationRecord(generation=number, **fields) for number in (3, 1, 2)]
    Rendezvous(folder)
    path = folder.parent / "elastic.jsonl"
    assert read_generation_records(path) == []
    for record in records:
        append_record(path, record)
    assert [record.generation for record in read_generation_records(path)] == [1, 2, 3]


def test_a_store_that_cannot_be_reached_is_not_a_missing_member(folder, monkeypatch):
    # Otherwise, members would start a generation without those that they cannot see.
    if not isinstance(folder, StorePath):
        pytest.skip("for stores")
    rendezvous = Rendezvous(folder)
    rendezvous.write(Member(member=0, incarnation="x"))

    def fail(self):
        raise StoreUnreachable("The store cannot be reached.")

    monkeypatch.setattr(StorePath, "read_version", fail)
    for read in (rendezvous.read, rendezvous.generation, rendezvous.job_end):
        with pytest.raises(StoreUnreachable):
            read(0)
