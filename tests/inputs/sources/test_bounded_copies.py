"""Files in an object store are read with a bounded number of local bytes, in a documented order."""

import contextlib
import itertools
import os
import pickle
import time
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from praxis_lite.core.errors import ConfigError
from praxis_lite.host import bounded_copies, object_stores
from praxis_lite.host.object_stores import StorePath
from praxis_lite.inputs import ArrayRecords, FromSource, NpyFiles
from praxis_lite.inputs.sources import bounded_files, in_place_files

pytest.importorskip("obstore")
FOLDER = "memory://bucket/data"
COUNTS = (13, 7, 1, 37, 29, 13, 7, 23)  # Rows in each file.
WIDTH = 1000  # float32 numbers in each row.
SIZE = sum(COUNTS)


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    object_stores._bucket.cache_clear()
    yield StorePath.opened(FOLDER)
    object_stores._bucket.cache_clear()


def write_files(store, tmp_path, counts=COUNTS):
    """Uploads .npy files, in which row n of the dataset has the values n."""
    first = 0
    for number, count in enumerate(counts):
        rows = np.arange(first, first + count, dtype=np.float32)
        np.save(tmp_path / "rows.npy", np.repeat(rows[:, None], WIDTH, axis=1))
        (store / f"{number:02}.npy").upload(tmp_path / "rows.npy")
        first += count


def pipeline(cache_bytes=500_000, window=17, batch_size=5, shuffle=True, **settings):
    source = NpyFiles(f"{FOLDER}/*.npy", cache_bytes=cache_bytes, **settings)
    return FromSource(source, batch_size, seed=3, shuffle=shuffle, shuffle_window=window)


def ids_of(batches):
    rows = np.concatenate([batch["x"][batch["weights"] > 0] for batch in batches])
    assert (rows == rows[:, :1]).all()
    return rows[:, 0].astype(int).tolist()


def expected_order(num_epochs, window, counts=COUNTS, seed=3):
    """Computes the documented order with Python lists."""

    def shuffled(items, stream, purpose):
        generator = np.random.Philox(key=[seed, stream], counter=[0, 0, 0, purpose])
        bits = generator.random_raw(len(items)).tolist()
        return [item for _, item in sorted(zip(bits, items, strict=True))]

    edges = np.cumsum([0, *counts]).tolist()
    files = [list(range(*edge)) for edge in itertools.pairwise(edges)]
    order, number = [], 0
    for epoch in range(num_epochs):
        rows = [row for file in shuffled(files, epoch, 2) for row in file]
        for start in range(0, len(rows), window):
            order += shuffled(rows[start : start + window], number, 3)
            number += 1
    return order


def bytes_of_copies(folder):
    """Returns the logical size of all files in a folder, while they are created and deleted."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


@pytest.mark.parametrize("window", [5, 17, SIZE - 1, SIZE, 1000])
def test_windows_are_shuffled_as_documented(store, tmp_path, window):
    write_files(store, tmp_path)
    batches = itertools.islice(pipeline(10**6, window).batches(), 3 * SIZE // 5 + 1)
    order = expected_order(4, window)
    assert ids_of(batches) == order[: len(range(0, 3 * SIZE // 5 + 1)) * 5]
    for epoch in range(3):
        assert sorted(order[epoch * SIZE : (epoch + 1) * SIZE]) == list(range(SIZE))


def test_each_host_and_each_resume_reads_the_same_rows(store, tmp_path):
    write_files(store, tmp_path)
    expected = list(itertools.islice(pipeline().batches(), 60))
    for start, parts in ((0, [(0, 5)]), (37, [(0, 2), (2, 5)]), (59, [(0, 1), (1, 3), (3, 5)])):
        hosts = [pipeline().batches(start, rows=slice(*part)) for part in parts]
        for batch in expected[start:]:
            rows = np.concatenate([next(host)["x"] for host in hosts])
            np.testing.assert_array_equal(rows, batch["x"])


def test_the_bound_holds_while_every_row_is_read_once(store, tmp_path, monkeypatch):
    write_files(store, tmp_path)
    largest = 0
    has_room = bounded_copies.BoundedCopies._has_room

    def measured(self, size, keep):
        result = has_room(self, size, keep)
        nonlocal largest
        largest = max(largest, bytes_of_copies(tmp_path / "cache") + size * result)
        return result

    monkeypatch.setattr(bounded_copies.BoundedCopies, "_has_room", measured)
    train = pipeline(cache_bytes=500_000, window=13)
    sizes = [status.st_size for status in store.files().values()]
    assert sum(sizes) > 500_000 > 2 * max(sizes)
    ids = ids_of(itertools.islice(train.batches(), SIZE // 5))
    assert ids == expected_order(1, 13)[: len(ids)]
    assert 400_000 < largest < 500_000 + 1000  # 1,000 bytes for the counts of the rows.


@pytest.mark.parametrize("batch_size", [3, 20])
def test_a_pass_in_order_reads_every_row_once(store, tmp_path, batch_size):
    write_files(store, tmp_path)
    batches = pipeline(500_000, None, batch_size, shuffle=False).batches()
    assert ids_of(batches) == list(range(SIZE))


def test_files_of_the_next_window_are_downloaded_in_advance(store, tmp_path):
    write_files(store, tmp_path, [4] * 8)
    train = pipeline(10**6, window=8, batch_size=4)
    batches = train.batches()
    next(batches)
    order = expected_order(1, 8, [4] * 8)
    wanted = {f"{row // 4:02}.npy" for row in order[:16]}
    deadline = time.monotonic() + 5
    copies = tmp_path / "cache/praxis_lite/stores"
    while {path.name[-6:] for path in copies.glob("*/copies/*.npy")} != wanted:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_only_the_ends_of_files_are_read_to_count_rows(store, tmp_path, monkeypatch):
    monkeypatch.setattr(bounded_files, "_HEAD", 4096)
    monkeypatch.setattr(bounded_files, "_TAIL", 200_000)
    path, random = tmp_path / "rows.array_record", np.random.default_rng(0)
    for number, count in enumerate((301, 257)):
        writer = ArrayRecordWriter(str(path), "group_size:1")
        for _ in range(count):
            writer.write(random.bytes(2003))
        writer.close()
        (store / f"{number}.array_record").upload(path)
    source = ArrayRecords(f"{FOLDER}/*.array_record", decode=bytes, cache_bytes=10**6)
    assert source.counts == [301, 257]
    assert not list((tmp_path / "cache").glob("**/*.array_record"))
    # A footer that is larger than the tail requires the complete file.
    monkeypatch.setattr(bounded_files, "_TAIL", 100)
    other = ArrayRecords(f"{FOLDER}/1*.array_record", decode=bytes, cache_bytes=10**6)
    assert other.counts == [257]
    assert list((tmp_path / "cache").glob("**/*.array_record"))


def test_compressed_arrays_are_counted(store, tmp_path):
    np.savez_compressed(tmp_path / "rows.npz", x=np.random.default_rng(0).normal(size=(137, 2000)))
    (store / "0.npz").upload(tmp_path / "rows.npz")
    source = NpyFiles(f"{FOLDER}/*.npz", cache_bytes=10**7)
    assert source.counts == [137]


def test_a_pickled_source_reads_the_same_versions(store, tmp_path):
    write_files(store, tmp_path)
    source = NpyFiles(f"{FOLDER}/*.npy", cache_bytes=10**6)
    assert len(source) == SIZE
    (store / "0.npy").upload(tmp_path / "rows.npy")  # The first in the order of names.
    copy = pickle.loads(pickle.dumps(source))
    assert len(copy) == SIZE and copy[0]["x"][0] == 0
    assert len(NpyFiles(f"{FOLDER}/*.npy", cache_bytes=10**6)) == SIZE + COUNTS[-1]


def test_files_written_later_are_not_used(store, tmp_path, caplog):
    write_files(store, tmp_path)
    time.sleep(0.01)
    now = datetime.now(UTC)
    before = pipeline(written_before=now.isoformat())
    fingerprint = before.fingerprint()
    (store / "99.npy").upload(tmp_path / "rows.npy")
    after = pipeline(written_before=now.isoformat())
    with caplog.at_level("INFO"):
        assert after.fingerprint() == fingerprint != pipeline().fingerprint()
    assert "1 of 9 files are not used" in caplog.text
    with pytest.raises(ConfigError, match="written_before"):
        pipeline(written_before=(now - timedelta(days=1)).isoformat()).check()


@pytest.mark.parametrize("change", ["write", "delete"])
def test_a_file_that_changes_after_the_start_is_reported(store, tmp_path, change):
    write_files(store, tmp_path)
    train = pipeline(window=13)
    batches = train.batches()
    next(batches)
    for number in range(len(COUNTS)):
        if change == "write":
            (store / f"{number:02}.npy").upload(tmp_path / "rows.npy")
        else:
            (store / f"{number:02}.npy").unlink()
    with pytest.raises(ConfigError, match=rf"{FOLDER}/\d\d.npy (has changed|was deleted)"):
        list(itertools.islice(batches, SIZE))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pipeline(100_000), r"cache_bytes is 100,000, but .*03.npy has 148,128"),
        (lambda: pipeline(0), "cache_bytes is 0, "),
        (lambda: pipeline(500_000, window=100), r"two windows of 100 .*at most \d\d,"),
        (lambda: pipeline(500_000, window=None), r"two windows of 130 .*at most \d\d,"),
        (
            lambda: pipeline(300_000, window=None, batch_size=40, shuffle=False),
            r"two batches of 40 .*batch_size to at most \d+,",
        ),
        (lambda: pipeline(500_000, window=3), "shuffle_window is 3; .*at least 5"),
        (lambda: pipeline(shuffle=False), "shuffle is False"),
        (lambda: pipeline(written_before="2026-11-30"), "2026-11-30.*offset"),
        (lambda: pipeline(None, written_before="2026-11-30T00:00Z"), "written_before.*cache_bytes"),
    ],
)
def test_wrong_settings_are_reported(store, tmp_path, make, message):
    write_files(store, tmp_path)
    with pytest.raises(ConfigError, match=message):
        make().check()


def test_local_files_are_not_bounded(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(7))
    with pytest.raises(ConfigError, match="cache_bytes"):
        NpyFiles(f"{tmp_path}/*.npy", cache_bytes=100).check()


def test_a_copy_that_is_in_use_is_not_deleted(store, tmp_path, monkeypatch):
    """Another user of the folder waits, and an error says what to change if it waits too long."""
    write_files(store, tmp_path, [100, 100, 100])
    first, second = (NpyFiles(f"{FOLDER}/*.npy", cache_bytes=900_000) for _ in range(2))
    assert first[0]["x"][0] == 0 and first[150]["x"][0] == 150
    monkeypatch.setattr(bounded_copies, "_MAX_WAIT_SECONDS", 0.2)
    with pytest.raises(ConfigError, match="02.npy.*cache_bytes"):
        second[299]
    assert second[50]["x"][0] == 50


def test_a_process_that_does_not_read_closes_its_copies(store, tmp_path, monkeypatch):
    write_files(store, tmp_path, [100, 100, 100])
    monkeypatch.setattr(bounded_copies, "_IDLE_SECONDS", 0.2)
    first, second = (NpyFiles(f"{FOLDER}/*.npy", cache_bytes=900_000) for _ in range(2))
    for _ in range(2):
        assert first[0]["x"][0] == 0 and first[150]["x"][0] == 150
        assert second[299]["x"][0] == 299


def test_the_number_of_open_files_is_limited(store, tmp_path, monkeypatch):
    write_files(store, tmp_path)
    monkeypatch.setattr(in_place_files, "_MAX_OPEN", 4)
    source = NpyFiles(f"{FOLDER}/*.npy", cache_bytes=10**6)
    for row in np.random.default_rng(0).permutation(SIZE).tolist():
        assert source[row]["x"][0] == row
        assert len(source.bounded._copies._open) <= 2


def test_a_download_that_was_interrupted_is_repeated(store, tmp_path):
    write_files(store, tmp_path)
    source = NpyFiles(f"{FOLDER}/*.npy", cache_bytes=200_000)
    copies = tmp_path / "copies"
    source.cache_dir = str(tmp_path)
    copies.mkdir()
    (copies / f"{source.bounded.stored[0].name_of_copy}.partial").write_bytes(b"partial")
    (copies / "0-150000-other.npy.partial").write_bytes(b"partial")
    assert source[0]["x"][0] == 0 and source[60]["x"][0] == 60
    assert not list(copies.glob("*.partial"))
