"""Tests steps in object stores, with local servers that implement the APIs of S3 and GCS."""

import dataclasses
import threading

import pytest

from praxis_lite import ConfigError, StepLost
from praxis_lite.checkpoints import tensorstore_write, tools
from praxis_lite.checkpoints.checkpoints import Checkpoints
from praxis_lite.checkpoints.digest import digest_of
from praxis_lite.checkpoints.init.loading_rules import CheckpointLoadingRules
from praxis_lite.checkpoints.init.sources import located, opened
from praxis_lite.checkpoints.steps.save_settings import SaveSettings
from praxis_lite.checkpoints.steps.step_store import StoredSteps
from praxis_lite.core.errors import FailedSave
from praxis_lite.host.object_stores import StorePath
from tests.checkpoints.saved_steps import SPECS, save_steps, true_state
from tests.checkpoints.test_checkpoints import SMALL, small_state
from tests.checkpoints.test_damage import mesh
from tests.support.fake_gcs import gcs_bucket
from tests.support.fake_s3 import s3_bucket
from tests.support.marks import slow_but


@pytest.fixture(scope="module", params=["gs", pytest.param("s3", marks=pytest.mark.slow)])
def bucket(request):
    with {"s3": s3_bucket, "gs": gcs_bucket}[request.param]() as url:
        yield StorePath.opened(url)


@pytest.fixture
def folder(bucket, request):
    return bucket / request.node.name.replace("[", "-").strip("]") / "checkpoints"


def save_small(folder, *steps, max_to_keep=3, **settings):
    saving = SaveSettings(max_to_keep=max_to_keep)
    with Checkpoints(folder, saving=saving, **settings) as checkpoints:
        for step in steps:
            checkpoints.save(step, small_state(mesh(), step), SMALL, {"next_batch": step})
            checkpoints.wait()


def restored(folder, **settings):
    checkpoints = Checkpoints(folder, **settings)
    restored = checkpoints.restore(SMALL, mesh())
    return restored.step, float(restored.state.mdl_vars["params"]["w"][0, 0])


@pytest.mark.parametrize("chunk_bytes", [64, pytest.param(1 << 26, marks=pytest.mark.slow)])
def test_every_dtype_is_stored_as_on_disk(folder, tmp_path, monkeypatch, chunk_bytes):
    monkeypatch.setattr(tensorstore_write, "_MAX_CHUNK_BYTES", chunk_bytes)
    save_steps(folder, {3: true_state()}, mesh_shape=(2, 2, 2), specs=SPECS)
    save_steps(tmp_path, {3: true_state()}, mesh_shape=(1, 1, 1), specs=SPECS)
    assert digest_of(folder / "3") == digest_of(tmp_path / "3")
    assert [step.state for step in tools.list_steps(folder)] == ["good"]
    assert tools.decoded_step_errors(folder / "3") == []


@pytest.mark.slow
def test_the_newest_steps_are_retained_and_the_newest_is_restored(folder):
    save_small(folder, 1, 2, 5, 7, max_to_keep=2)
    assert StoredSteps(folder).committed() == [5, 7] and folder.folders() == ["5", "7"]
    assert restored(folder) == (7, 7.0)


@pytest.mark.slow
def test_a_step_without_a_commit_is_ignored_and_removed_by_the_next_launch(folder):
    save_small(folder, 3, 5)
    (folder / "5" / "commit.json").unlink()
    assert restored(folder) == (3, 3.0)
    notes = []
    save_small(folder, 5, note=notes.append)
    assert any("removed 5" in note for note in notes) and restored(folder) == (5, 5.0)


@pytest.mark.parametrize("damage", slow_but(("replaced",), ["replaced", "missing", "manifest"]))
def test_a_damaged_step_is_skipped_by_readers_and_set_aside_by_its_job(folder, damage):
    save_small(folder, 3, 5)
    name = next(name for name in (folder / "5").files() if name.startswith("mdl_vars/d/"))
    file = folder / "5" / ("manifest.json" if damage == "manifest" else name)
    if damage == "missing":
        file.unlink()
    else:
        content = file.read_bytes()
        file.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    notes = []
    assert restored(folder, note=notes.append) == (3, 3.0) and "5 is damaged" in notes[0]
    with pytest.raises(StepLost, match="step 5.*damaged"):
        Checkpoints(folder).restore(SMALL, mesh(), step=5)
    with Checkpoints(folder, saving=SaveSettings(), note=notes.append) as checkpoints:
        assert checkpoints.latest_step() == 3
    assert (folder / "5" / "commit.damaged.json").is_file()
    save_small(folder, 5)
    assert restored(folder) == (5, 5.0)


@pytest.mark.slow
def test_a_failed_save_leaves_nothing_behind(folder, monkeypatch):
    save_small(folder, 3)
    monkeypatch.setattr(StoredSteps, "commit", lambda *_: 1 / 0)
    with pytest.raises(FailedSave, match="step 5"):
        save_small(folder, 5)
    assert folder.folders() == ["3"]


def lost():
    raise ConfigError("the lease is lost")


def test_a_job_without_its_lease_does_not_replace_a_step(folder):
    save_small(folder, 3, 5)
    before, is_lost = folder.files(), [True]
    guarded = dataclasses.replace(folder, guard=lambda: lost() if is_lost else None)
    with pytest.raises(FailedSave, match="step 5.*the lease is lost"):
        save_small(guarded, 5)
    is_lost.clear()
    writing = tensorstore_write.TensorStoreWrite(guarded / "6", lambda: None)
    writing.begin(small_state(mesh(), 6))
    is_lost.append(True)
    with pytest.raises(ConfigError, match="the lease is lost"):
        writing.wait()
    assert folder.files() == before


def test_a_job_that_loses_its_lease_after_a_commit_deletes_no_old_step(folder):
    save_small(folder, 3, 5)
    is_lost, notes = [], []
    guarded = dataclasses.replace(folder, guard=lambda: lost() if is_lost else None)
    save_small(guarded, 7, max_to_keep=2, saved=is_lost.append, note=notes.append)
    assert StoredSteps(folder).committed() == [3, 5, 7]
    assert "could not be deleted: the lease is lost" in notes[0]


def test_a_process_deletes_no_files_that_another_may_already_be_writing(folder, monkeypatch):
    names = ["commit.json", "mdl_vars/manifest.ocdbt"]
    names += [f"mdl_vars/ocdbt.process_{process}/d/data" for process in range(3)]
    for name in names:
        (folder / "6" / name).write_bytes(b"old")
    # The step was saved by three processes, and is saved again by two.
    for index, left in ((1, [*names[:3], names[4]]), (0, [])):
        monkeypatch.setattr("praxis_lite.job.processes.count", lambda: 2)
        monkeypatch.setattr("praxis_lite.job.processes.index", lambda index=index: index)
        writing = tensorstore_write.TensorStoreWrite(folder / "6", lambda: None)
        writing.begin(small_state(mesh(), 6))
        assert sorted((folder / "6").files()) == sorted(left)
    (folder / "6" / names[3]).write_bytes(b"new")
    writing.begin(small_state(mesh(), 6))
    assert [*(folder / "6").files()] == [names[3]]


@pytest.mark.slow
def test_an_outdated_listing_does_not_change_the_steps(folder, monkeypatch):
    save_small(folder, 3, 5)
    monkeypatch.setattr(StorePath, "folders", lambda self: ["2", "3"])
    assert StoredSteps(folder).committed() == [3, 5] and restored(folder) == (5, 5.0)


@pytest.mark.slow
def test_metrics_are_uploaded_before_the_commit(folder):
    seen = []
    save_small(folder, 3, before_commit=lambda: seen.append(StoredSteps(folder).committed()))
    assert seen == [[], []]


@pytest.mark.slow
def test_a_rolled_back_step_is_not_listed(folder):
    save_small(folder, 3, 5)
    with Checkpoints(folder, saving=SaveSettings()) as checkpoints:
        checkpoints.abandon_after(3)
        assert checkpoints.all_steps() == [3]
    assert folder.folders() == ["3"]


@pytest.mark.slow
def test_a_copied_folder_is_a_step_on_disk(folder, tmp_path):
    save_small(folder, 3)
    for name in folder.files():
        (folder / name).download(tmp_path / name)
    assert [step.state for step in tools.list_steps(tmp_path)] == ["good"]
    assert digest_of(tmp_path / "3") == digest_of(folder / "3")


@pytest.mark.slow
def test_initial_arrays_are_loaded_from_a_store(folder):
    save_small(folder, 3)
    for given in (folder.parent, folder, folder / "3"):
        directory, step = located(str(given), CheckpointLoadingRules(load_rules=[("x", "x")]))
        with opened(directory) as source:
            leaves = {x.path: x for x in SMALL.leaves() if x.path.startswith("mdl_vars/")}
            arrays = source.restore_leaves(leaves, mesh(), step=step)
        assert float(arrays["mdl_vars/params/w"][6, 4]) == 3.0


@pytest.mark.slow
def test_an_empty_folder_has_no_checkpoint(folder):
    with pytest.raises(ConfigError, match="://bucket.*contains no checkpoints|not a directory"):
        tools.steps_directory(str(folder))
    assert Checkpoints(folder).latest_step() is None


@pytest.mark.parametrize("saving", [None, pytest.param(SaveSettings(), marks=pytest.mark.slow)])
def test_a_restore_sends_few_requests_one_after_another(folder, monkeypatch, saving):
    save_small(folder, 3, 5)
    num_files = len((folder / "5").files()) - 2  # Except commit.json and manifest.json.
    # The list of steps, their commits, the commit and the manifest of the newest, its files, its
    # commit, its two databases, and its commit again after the arrays are read.
    rounds = [2, 2, 2, num_files, 1, 2, 1]
    if saving is not None:  # The job first looks for folders without a commit.
        rounds = [1, 2, *rounds]
    # Each request of a round waits until all others have started.
    barriers = [barrier for num in rounds for barrier in [threading.Barrier(num, timeout=20)] * num]
    started, send = iter(barriers), StorePath._retried

    def wait_and_send(path, action, request):
        next(started).wait()
        return send(path, action, request)

    monkeypatch.setattr(StorePath, "_retried", wait_and_send)
    with Checkpoints(folder, saving=saving) as checkpoints:
        assert checkpoints.restore(SMALL, mesh()).step == 5
    assert next(started, None) is None
