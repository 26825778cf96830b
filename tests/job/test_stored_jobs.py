"""Tests job directories in object stores: files are uploaded in parts, and a lease is the lock."""

import dataclasses
import itertools
import json
import os
import socket
import threading
import time

import pytest

from praxis_lite import ConfigError
from praxis_lite.checkpoints.steps.step_store import StoredSteps
from praxis_lite.checkpoints.steps.verified_steps import VerifiedSteps
from praxis_lite.checkpoints.tensorstore_write import TensorStoreWrite
from praxis_lite.core.errors import PeerLost
from praxis_lite.host import object_stores
from praxis_lite.host.object_stores import ObjectChanged, StorePath
from praxis_lite.job import job_lock, mirror
from praxis_lite.job.job_dir import job_dir_at, open_for_reading, open_for_training
from praxis_lite.job.job_lock import Lease, LeaseOfFirst, is_leased
from praxis_lite.job.local_directory import local_directory
from praxis_lite.job.mirror import Mirror
from praxis_lite.job.processes.membership import Membership
from praxis_lite.job.processes.watchdog import write_report
from tests.support.fake_s3 import s3_bucket
from tests.support.store_proxy import StoreProxy

obstore = pytest.importorskip("obstore.store")


@pytest.fixture
def store():
    object_stores._bucket.cache_clear()
    return StorePath.opened("memory://bucket/jobs/one")


@pytest.fixture
def mirrors(store, tmp_path, monkeypatch):
    monkeypatch.setattr(mirror, "_PART_BYTES", 7)
    (tmp_path / "writer").mkdir()
    (tmp_path / "reader").mkdir()
    return Mirror(store, tmp_path / "writer"), Mirror(store, tmp_path / "reader")


def requests_of(monkeypatch):
    written, write = [], StorePath.write_bytes

    def write_bytes(self, content, mode=None):
        written.append(self.name)
        return write(self, content, mode)

    monkeypatch.setattr(StorePath, "write_bytes", write_bytes)
    return written


def test_a_growing_file_is_uploaded_and_downloaded_by_parts(mirrors, monkeypatch):
    writer, reader = mirrors
    file, copy = writer.folder / "metrics.jsonl", reader.folder / "metrics.jsonl"
    written = requests_of(monkeypatch)
    for text, parts in [
        ("", ["metrics.jsonl"]),
        ("a" * 5, ["metrics.jsonl"]),
        ("a" * 5 + "b" * 11, ["metrics.jsonl", "metrics.jsonl.part1", "metrics.jsonl.part2"]),
        ("a" * 5 + "b" * 12, ["metrics.jsonl.part2"]),
        ("a" * 5 + "c", ["metrics.jsonl"]),  # Shorter, after a roll-back.
        ("a" * 5 + "c", []),
    ]:
        file.write_text(text)
        written.clear()
        writer.upload()
        assert written == parts
        reader.download()
        assert copy.read_text() == text


def test_a_second_writer_uploads_only_what_it_changed(mirrors, monkeypatch):
    writer, reader = mirrors
    (writer.folder / "config.json").write_text("{}")
    (writer.folder / ".hidden").write_text("x")
    writer.upload()
    reader.download()
    (reader.folder / "decode").mkdir()
    (reader.folder / "decode" / "7.jsonl").write_text("x")
    written = requests_of(monkeypatch)
    reader.upload()
    assert written == ["7.jsonl"] and reader.names() == ["config.json", "decode"]


def test_a_deleted_file_is_deleted_in_the_store(mirrors):
    writer, _ = mirrors
    (writer.folder / "a").write_text("x" * 15)
    writer.upload()
    (writer.folder / "a").unlink()
    writer.upload()
    assert writer.names() == []


def test_a_new_job_is_created_and_found(store):
    job = open_for_training(str(store), "lm.Synthetic")
    with job.uploading():
        job.write_config(json.dumps({"experiment": "lm.Synthetic"}), ["a=1"])
    reopened = open_for_training(str(store), "lm.Synthetic")
    assert reopened.config_txt.read_text() == "a=1\n" and reopened.path != job.path
    assert open_for_reading(str(store)).location == store
    with pytest.raises(ConfigError, match="memory://bucket/jobs/one contains a job.*lm.Synthetic"):
        open_for_training(str(store), "lm.Other")


def test_a_folder_with_other_files_or_without_a_job_is_rejected(store):
    (store / "data.txt").write_bytes(b"x")
    with pytest.raises(ConfigError, match="contains data.txt but no config.json"):
        open_for_training(str(store), "lm.Synthetic")
    with pytest.raises(ConfigError, match="memory://bucket/none has no config.json"):
        open_for_reading("memory://bucket/none")


def test_a_url_is_rejected_where_a_local_directory_is_required():
    with pytest.raises(ConfigError, match=r"URL \(s3\).*local directory"):
        local_directory("s3://bucket/x")


def test_a_lease_is_held_by_one_process_and_released(store, monkeypatch):
    monkeypatch.setattr(job_lock, "_RENEW_SECONDS", 0.1)
    assert not is_leased(store)
    with Lease(store):
        assert is_leased(store)
        with pytest.raises(ConfigError, match="one is in use by another process.*process"):
            Lease(store).__enter__()
    assert not is_leased(store)
    with Lease(store):
        pass


@pytest.mark.parametrize("container", ["this", "other"])
def test_the_lease_of_a_dead_process_is_taken(store, monkeypatch, container):
    """Immediately in the same container, and after the lease has expired in another one."""
    monkeypatch.setattr(job_lock, "LEASE_SECONDS", 1e9 if container == "this" else 0.3)
    monkeypatch.setattr(job_lock, "_RENEW_SECONDS", 0.1)
    holder = {"host": socket.gethostname(), "pid": 2**22 + 1, "token": "x", "renewal": 3}
    holder["pid_namespace"] = job_lock._pid_namespace() if container == "this" else "other"
    (store / ".training").write_bytes(json.dumps(holder).encode())
    with Lease(store):
        assert json.loads((store / ".training").read_bytes())["pid"] != holder["pid"]


def test_a_process_whose_lease_was_taken_ends(store, monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(job_lock, "_RENEW_SECONDS", 0.05)
    monkeypatch.setattr(job_lock, "end_now", lambda status, why: ended.set())
    with Lease(store):
        (store / ".training").write_bytes(b'{"host": "thief", "pid": 1}')
        assert ended.wait(5)
    assert b"thief" in (store / ".training").read_bytes()


def member_of(generation, supervisor):
    return Membership(
        generation=generation,
        member=0,
        members=(0,),
        num_slots=2,
        coordinator="127.0.0.1:7",
        key=b"k",
        lost_status=75,
        supervisor=f"127.0.0.1:{supervisor.getsockname()[1]}",
    )


@pytest.fixture
def supervisor():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_the_next_generation_takes_the_lease_at_once_if_the_supervisor_has_ended(
    store, monkeypatch, supervisor
):
    monkeypatch.setattr(job_lock, "LEASE_SECONDS", 1e9)
    member = member_of(3, supervisor)
    holder = {"host": "other", "pid": 1, "token": "x", "generation": 3}
    (store / ".training").write_bytes(
        json.dumps({**holder, "supervisor": member.supervisor}).encode()
    )
    supervisor.close()
    with Lease(store, dataclasses.replace(member, generation=5)) as lease:
        assert json.loads((store / ".training").read_bytes())["token"] == lease.token


def test_the_next_generation_waits_until_a_worker_of_the_previous_one_cannot_write(
    store, monkeypatch, supervisor
):
    ended = []
    monkeypatch.setattr(job_lock, "LEASE_SECONDS", 0.8)
    monkeypatch.setattr(job_lock, "_RENEW_SECONDS", 0.1)
    monkeypatch.setattr(job_lock, "_CHECK_SECONDS", 0.0)
    monkeypatch.setattr(job_lock, "end_now", lambda status, why: ended.append(status))
    with Lease(store, member_of(3, supervisor)) as previous:
        previous.check()
        with Lease(store, member_of(4, supervisor)) as lease:
            with pytest.raises(ConfigError, match="the lease could not be renewed"):
                previous.check()
            lease.check()
            assert ended == [75] * len(ended) and ended


def test_a_late_worker_does_not_take_the_lease_of_a_later_generation(
    store, monkeypatch, supervisor
):
    """The error is no ConfigError, which would end the job."""
    monkeypatch.setattr(job_lock, "_RENEW_SECONDS", 0.1)
    with Lease(store, member_of(4, supervisor)) as lease:
        with pytest.raises(PeerLost, match="one is in use by another process"):
            Lease(store, member_of(3, supervisor)).__enter__()
        other = LeaseOfFirst(store, member_of(3, supervisor))
        with pytest.raises(PeerLost, match="one was taken over"):
            other.check()
        lease.check()


def test_a_job_continues_with_what_the_previous_process_wrote_last(store):
    first, second = (job_dir_at(str(store), writes=True) for _ in range(2))
    with first.locked(print), first.uploading():
        first.write_config("{}", [])
        first.metrics_jsonl.write_text("1\n")
    with second.locked(print), second.uploading(), second.metrics_jsonl.open("a") as file:
        file.write("2\n")
    assert (store / "metrics.jsonl").read_bytes() == b"1\n2\n"


def test_reports_of_several_processes_are_appended(store):
    jobs = [job_dir_at(str(store), writes=True) for _ in range(2)]
    for k, job in enumerate(jobs):
        write_report(f"report {k}\n", job.stacks_txt)
        job.upload()
    lines = (store / "stacks.txt").read_bytes().decode().splitlines()
    assert [line.split()[-1] for line in lines] == ["0", "1"]


def test_an_append_whose_answer_was_lost_is_not_repeated(store, monkeypatch):
    write, lost = StorePath.write_bytes, [True, False, True, False]

    def write_bytes(self, content, mode=None):
        version = write(self, content, mode)
        if lost.pop(0):
            raise ObjectChanged(str(self))
        return version

    monkeypatch.setattr(StorePath, "write_bytes", write_bytes)
    for line in (b"1\n", b"2\n", b"3\n"):
        (store / "log").append_bytes(line)
    assert (store / "log").read_bytes() == b"1\n2\n3\n"


TAKEN = b'{"host": "other", "pid": 1, "token": "x"}'


def repair(job):
    VerifiedSteps(job.checkpoints, owned=True, note=print).repair()


def delete_file(job):
    job.config_json.unlink()
    job.upload()


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(
            lambda job: TensorStoreWrite(job.checkpoints / "5", print)._delete_old_files(),
            id="saved again",
        ),
        pytest.param(lambda job: StoredSteps(job.checkpoints).discard(7), id="failed save"),
        pytest.param(
            lambda job: VerifiedSteps(job.checkpoints, owned=True, note=print).delete([3]),
            id="retention",
        ),
        pytest.param(repair, id="repair"),
        pytest.param(lambda job: StoredSteps(job.checkpoints).quarantine(5), id="quarantine"),
        pytest.param(lambda job: StoredSteps(job.checkpoints).abandon(5), id="roll-back"),
        pytest.param(
            lambda job: StoredSteps(job.checkpoints).commit("7", {"step": 7}), id="commit"
        ),
        pytest.param(delete_file, id="deleted file"),
        pytest.param(lambda job: job.checkpoints.remove_folder(), id="failed creation"),
    ],
)
def test_a_suspended_process_changes_nothing_after_its_lease_was_taken(store, monkeypatch, change):
    monkeypatch.setattr(job_lock, "_RENEW_SECONDS", 1e6)  # The thread has not run yet.
    monkeypatch.setattr(job_lock, "_CHECK_SECONDS", 0.0)
    job = job_dir_at(str(store), writes=True)
    with job.locked(print):
        job.write_config("{}", [])
        job.upload()
        steps = StoredSteps(job.checkpoints)
        for step in (3, 5):
            steps.commit(str(step), {"step": step})
        (job.checkpoints / "7" / "array").write_bytes(b"x")
        wakes_at = job_lock._seconds() + job_lock.LEASE_SECONDS
        monkeypatch.setattr(job_lock, "_seconds", lambda: wakes_at)
        (store / ".training").write_bytes(TAKEN)
        before = store.files()
        with pytest.raises(ConfigError, match="jobs/one: the lease could not be renewed"):
            change(job)
        assert store.files() == before


def test_other_processes_write_only_while_the_first_renews_its_lease(store, monkeypatch):
    monkeypatch.setattr(job_lock, "_RENEW_SECONDS", 0.05)
    monkeypatch.setattr(job_lock, "_CHECK_SECONDS", 0.3)
    monkeypatch.setattr(job_lock, "end_now", lambda status, why: None)
    other = LeaseOfFirst(store)
    with Lease(store) as lease:
        other.token = lease.token
        other.check()
        wakes_at = job_lock._seconds() + job_lock.LEASE_SECONDS
        monkeypatch.setattr(job_lock, "_seconds", lambda: wakes_at)
        other.check()
        lease._stopped.set()
        lease._thread.join()
        wakes_again_at = wakes_at + job_lock.LEASE_SECONDS
        monkeypatch.setattr(job_lock, "_seconds", lambda: wakes_again_at)
        with pytest.raises(ConfigError, match="jobs/one: the lease could not be renewed"):
            other.check()
        (store / ".training").write_bytes(TAKEN)
        with pytest.raises(ConfigError, match="jobs/one was taken over"):
            other.check()


class SlowProxy(StoreProxy):
    """Delays renewals of the lease while `is_slow` is set, and carries them out later."""

    is_slow, num_delayed = False, 0

    def handle(self, request, handler):
        if self.is_slow and request.method == "PUT" and ".training" in request.path:
            self.num_delayed += 1
            while self.is_slow:
                time.sleep(0.02)
        super().handle(request, handler)


def test_a_holder_whose_renewals_hang_writes_nothing_after_its_lease_was_taken(
    tmp_path, monkeypatch
):
    ended = threading.Event()
    monkeypatch.setattr(job_lock, "LEASE_SECONDS", 2.0)
    monkeypatch.setattr(job_lock, "_RENEW_SECONDS", 0.1)
    monkeypatch.setattr(job_lock, "_CHECK_SECONDS", 3.0)
    monkeypatch.setattr(job_lock, "end_now", lambda status, why: ended.set())
    monkeypatch.setattr(object_stores, "_QUICK", object_stores._Limits(1, 1, 0, 0.0, 0.0))
    with s3_bucket() as url:
        direct = obstore.S3Store("bucket", client_options={"allow_http": True})
        proxy = SlowProxy(os.environ["AWS_ENDPOINT_URL"])
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        job = Mirror(StorePath.opened(f"{url}/job"), tmp_path)
        with Lease(job.store) as lease:
            job.store = dataclasses.replace(job.store, guard=lease.check)
            uploads = job.uploading()
            uploads.__enter__()
            (tmp_path / "metrics.jsonl").write_text("1")
            job.upload()
            proxy.is_slow = True
            time.sleep(job_lock.LEASE_SECONDS)
            direct.put("job/.training", TAKEN)
            (tmp_path / "metrics.jsonl").write_text("2")
            with pytest.raises(ConfigError, match="/job: the lease could not be renewed"):
                job.upload()
            assert proxy.num_delayed > 1 and not ended.is_set()
            proxy.is_slow = False
            assert ended.wait(5)
            with pytest.raises(ConfigError, match="/job: the lease could not be renewed"):
                uploads.__exit__(None, None, None)
        assert bytes(direct.get("job/metrics.jsonl").bytes()) == b"1"
        assert bytes(direct.get("job/.training").bytes()) == TAKEN
        proxy.close()


def test_a_renewal_whose_answer_was_lost_keeps_the_lease(store, monkeypatch):
    ended, num_lost, write = [], 0, StorePath.write_bytes

    def write_bytes(self, content, mode=None):
        nonlocal num_lost
        version = write(self, content, mode)
        if mode not in (None, "create") and content != b"{}" and num_lost < 2:
            num_lost += 1
            raise ConfigError("The answer was lost.")
        return version

    with Lease(store) as lease:
        monkeypatch.setattr(job_lock, "_RENEW_SECONDS", 0.02)
        monkeypatch.setattr(job_lock, "end_now", lambda status, why: ended.append(why))
        monkeypatch.setattr(StorePath, "write_bytes", write_bytes)
        lease._thread = threading.Thread(target=lease._renew_until_stopped)
        lease._thread.start()
        time.sleep(0.5)
        lease.check()
    assert num_lost == 2 and not ended and not is_leased(store)


def test_a_lease_that_is_renewed_is_not_taken_after_a_slow_read(store, monkeypatch):
    monkeypatch.setattr(job_lock, "LEASE_SECONDS", 0.3)
    monkeypatch.setattr(job_lock, "_RENEW_SECONDS", 0.1)
    stopped, slow, read = threading.Event(), [0.5], StorePath.read_version

    def renew():
        for number in itertools.count():
            holder = {"host": "other", "pid": 1, "token": "x", "renewal": number}
            (store / ".training").write_bytes(json.dumps(holder).encode())
            if stopped.wait(0.1):
                return

    def read_version(self):
        time.sleep(slow.pop() if slow else 0)
        return read(self)

    monkeypatch.setattr(StorePath, "read_version", read_version)
    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(ConfigError, match="process 1 on other"):
            Lease(store).__enter__()
    finally:
        stopped.set()
        thread.join()


def test_an_outdated_listing_hides_no_file_from_the_next_launch(mirrors, monkeypatch):
    writer, reader = mirrors
    objects, outdated = StorePath._objects, [{}, {}]
    (writer.folder / "metrics.jsonl").write_text("a" * 9)
    writer.upload()
    monkeypatch.setattr(
        StorePath, "_objects", lambda self: outdated.pop() if outdated else objects(self)
    )
    reader.download(newest=True)
    assert (reader.folder / "metrics.jsonl").read_text() == "a" * 9 and not outdated
    assert list(writer.store.files()) == ["metrics.jsonl", "metrics.jsonl.part1"]
