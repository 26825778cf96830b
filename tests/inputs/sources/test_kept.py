"""What is kept on disk: as it was written, or made again."""

import gzip
import json
import logging
import os
import pickle
import struct
import time
from pathlib import Path

import google_crc32c
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from praxis_lite.core.errors import ConfigError
from praxis_lite.inputs import (
    ArrowFiles,
    Documents,
    FromSource,
    JsonLines,
    NpyFiles,
    PackedText,
    Parquet,
    TfRecords,
)
from praxis_lite.inputs.processes import compared
from praxis_lite.inputs.sources import kept
from praxis_lite.inputs.sources.files.plain import partial_path

VALUES = {"num_examples": 3, "words": ["a", "é"]}
ARRAYS = {"starts": np.arange(7), "none": np.zeros((0, 3), np.float32)}
ROWS = [{"n": n, "text": f"text {n} é"} for n in range(13)]
LINES = "".join(json.dumps(item) + "\n" for item in ROWS).encode()


def test_it_is_read_as_it_was_written(tmp_path):
    partial = partial_path(str(tmp_path))
    with open(partial, "wb") as file:
        file.write(b"other")
    kept.write(str(tmp_path), "one", VALUES, ARRAYS, {"end": partial})
    values, arrays, files, digests = kept.read(str(tmp_path), "one")
    assert values == VALUES
    np.testing.assert_equal(arrays, ARRAYS)
    assert arrays["none"].shape == (0, 3) and arrays["none"].dtype == np.float32
    assert files == {"end": f"{tmp_path}/one.end"} and set(digests) == {"starts", "none", "end"}
    assert (tmp_path / "one.end").read_bytes() == b"other"
    assert kept.read(str(tmp_path), "two") is None
    assert not list(tmp_path.glob(".*"))


def tf_record(data):
    def masked(x):
        crc = google_crc32c.value(x)
        return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)

    length = struct.pack("<Q", len(data))
    return length + masked(length) + data + masked(data)


def json_of(record):
    return json.loads(record)


def is_odd(example):
    return example["n"] % 2 == 1


def number_alone(example):
    return {"n": example["n"]}


def zstd(data):
    return pyarrow.Codec("zstd").compress(data, asbytes=True)


def rows_of(source):
    return [{name: str(value) for name, value in source[k].items()} for k in range(len(source))]


def batches_of(pipeline):
    return [{name: leaf.tolist() for name, leaf in batch.items()} for batch in pipeline.batches()]


def packed_of(path, **settings):
    documents = Documents(JsonLines(path), **settings)
    return batches_of(PackedText(documents, "train", 4, 31, shuffle=False))


def write_arrow(path):
    table = pyarrow.Table.from_pylist(ROWS)
    options = pyarrow.ipc.IpcWriteOptions(compression="zstd")
    with pyarrow.ipc.new_file(path, table.schema, options=options) as file:
        file.write_table(table)


# All that keeps something: how its file is written, and all that is read of it.
KEEPERS = {
    "jsonl": (
        lambda path: Path(path).write_bytes(LINES.replace(b"}\n", b"}\n\n", 3)),
        lambda path: rows_of(JsonLines(path)),
    ),
    "jsonl.gz": (
        lambda path: Path(path).write_bytes(gzip.compress(LINES)),
        lambda path: rows_of(JsonLines(path)),
    ),
    "jsonl.zst": (
        lambda path: Path(path).write_bytes(zstd(LINES)), lambda path: rows_of(JsonLines(path))
    ),
    "tfrecord": (
        lambda path: Path(path).write_bytes(b"".join(map(tf_record, LINES.splitlines()))),
        lambda path: rows_of(TfRecords(path, decode=json_of)),
    ),
    "tfrecord.gz": (
        lambda path: Path(path).write_bytes(
            gzip.compress(b"".join(map(tf_record, LINES.splitlines())))
        ),
        lambda path: rows_of(TfRecords(path, decode=json_of)),
    ),
    "parquet": (
        lambda path: pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist(ROWS), path, row_group_size=5
        ),
        lambda path: rows_of(Parquet(path)),
    ),
    "parquet in order": (
        lambda path: pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist(ROWS), path, row_group_size=5
        ),
        lambda path: [str(item) for _, item in Parquet(path).read(0, 13)],
    ),
    "arrow": (write_arrow, lambda path: rows_of(ArrowFiles(path))),
    "npy": (
        lambda path: np.save(path, np.arange(26).reshape(13, 2)),
        lambda path: rows_of(NpyFiles(path)),
    ),
    "filtered": (
        lambda path: Path(path).write_bytes(LINES),
        lambda path: batches_of(
            FromSource(JsonLines(path), 4, number_alone, is_odd, shuffle=False)
        ),
    ),
    "packed": (lambda path: Path(path).write_bytes(LINES), packed_of),
    "lengths": (
        lambda path: Path(path).write_bytes(LINES), lambda path: packed_of(path, ahead=False)
    ),
}


def flipped(path):
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 4] ^= 1
    path.write_bytes(data)


def flipped_at_its_end(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 2
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def emptied(path):
    path.write_bytes(b"")


def garbage(path):
    path.write_bytes(b"x" * path.stat().st_size)


def removed(path):
    path.unlink()


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def link_to_itself(path):
    path.unlink()
    path.symlink_to(path.name)


HARMS = [flipped, flipped_at_its_end, cut, emptied, garbage, removed, pipe, link_to_itself]


def files_of(folder):
    actual = (path for path in (folder / ".praxis_lite").rglob("*") if path.is_file())
    return sorted(path for path in actual if path.name not in ("lock", "recipe.json"))


QUICK = ("jsonl.gz", "parquet", "filtered")


@pytest.mark.parametrize("keeper", [
    pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in KEEPERS
])  # fmt: skip
def test_what_is_damaged_is_made_again_with_a_line_whoever_keeps_it(keeper, tmp_path, caplog):
    write, read = KEEPERS[keeper]
    path = f"{tmp_path}/a.{keeper.split()[0]}"
    write(path)
    expected = read(path)
    kept_files = files_of(tmp_path)
    assert kept_files
    for file in kept_files:
        for harm in HARMS:
            caplog.clear()
            harm(file)
            with caplog.at_level(logging.WARNING):
                assert read(path) == expected, (file, harm)
            # Where all of an entry is gone there was none.
            is_silent = harm is removed and file.suffix == ".json"
            assert ("it is made again" in caplog.text) != is_silent, (file, harm)
            assert read(path) == expected and files_of(tmp_path) == kept_files


@pytest.mark.parametrize("keeper", ["jsonl", "jsonl.gz", "parquet", "npy", "packed"])
def test_what_is_kept_of_another_file_is_not_taken(keeper, tmp_path):
    write, read = KEEPERS[keeper]
    for name in "ab":
        write(f"{tmp_path}/{name}.{keeper}")
    expected, data = read(f"{tmp_path}/a.{keeper}"), (tmp_path / f"a.{keeper}").read_bytes()
    # As long, and as old.
    (tmp_path / f"b.{keeper}").write_bytes(data.replace(b"text 1", b"TEXT 7"))
    state = os.stat(f"{tmp_path}/a.{keeper}")
    os.utime(f"{tmp_path}/b.{keeper}", ns=(state.st_atime_ns, state.st_mtime_ns))
    read(f"{tmp_path}/b.{keeper}")
    for file in files_of(tmp_path):
        if file.name.startswith("b."):
            os.replace(file, file.with_name("a" + file.name[1:]))
    assert read(f"{tmp_path}/a.{keeper}") == expected


@pytest.mark.parametrize("content", [
    "[7]", "null", "{}", "[" * 10**5, '{"version": 3}',
    '{"version": 2, "values": {}, "arrays": {}}',
    '{"xxh3": "0", "kept": {"version": 3, "name": "a", "values": 7, "files": []}}', "\ud800",
])  # fmt: skip
def test_another_json_is_made_again(content, tmp_path, caplog):
    (tmp_path / "a.jsonl").write_bytes(LINES)
    expected = rows_of(JsonLines(f"{tmp_path}/a.jsonl"))
    (file,) = (tmp_path / ".praxis_lite").glob("*.json")
    file.write_bytes(content.encode(errors="surrogatepass"))
    with caplog.at_level(logging.WARNING):
        assert rows_of(JsonLines(f"{tmp_path}/a.jsonl")) == expected
    assert "of an earlier version); it is made again" in caplog.text


def test_a_file_is_compared_once_by_a_process_and_those_that_it_starts(tmp_path, monkeypatch):
    large = np.arange(1 << 18)
    kept.write(str(tmp_path), "one", {}, {"x": large})
    path = f"{tmp_path}/one.x.npy"
    assert kept.read(str(tmp_path), "one").arrays["x"][-1] == large[-1]
    assert path not in compared.known()  # It was written only now.
    monkeypatch.setattr(compared, "_SETTLED_SECONDS", -1e9)
    kept.read(str(tmp_path), "one")
    known = pickle.loads(pickle.dumps(compared.known()))
    hashed = []
    monkeypatch.setattr(kept, "digest_of", lambda file: hashed.append(1))
    monkeypatch.setattr(compared, "_compared", {})
    compared.take({path: known[path]})
    assert kept.read(str(tmp_path), "one").arrays["x"].tolist() == large.tolist() and not hashed
    time.sleep(0.01)  # The clock of files ticks.
    flipped(tmp_path / "one.x.npy")
    os.utime(path, ns=(0, known[path][0][3]))
    monkeypatch.undo()
    assert kept.read(str(tmp_path), "one") is None


def test_what_cannot_be_written_is_told(tmp_path):
    with pytest.raises(ConfigError, match="none/one"):
        kept.write(f"{tmp_path}/none", "one", VALUES, ARRAYS)
    (tmp_path / "one.json").mkdir()
    with pytest.raises(ConfigError, match="one.json"):
        kept.write(str(tmp_path), "one", VALUES, ARRAYS)


@pytest.mark.parametrize("make", [
    lambda path: os.mkfifo(path), lambda path: os.mkdir(path),
    lambda path: os.symlink("../target", path),
])  # fmt: skip
def test_a_lock_that_is_no_plain_file_is_refused_and_not_waited_for(make, tmp_path):
    (tmp_path / "target").write_text("mine")
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / ".praxis_lite").mkdir()
    make(f"{tmp_path}/.praxis_lite/lock")
    with pytest.raises(ConfigError, match="cache_dir"):
        JsonLines(f"{tmp_path}/a.jsonl").check()
    assert (tmp_path / "target").read_text() == "mine"


def test_names_as_long_as_a_file_system_takes_them_and_of_any_bytes(tmp_path, caplog):
    # What was logged of such a name, pytest's workers cannot send.
    caplog.set_level(logging.CRITICAL, "praxis_lite")
    for name in (b"x" * 249 + b".jsonl", b"caf\xe9.jsonl"):
        path = os.fsdecode(os.path.join(os.fsencode(tmp_path), name))
        with open(path, "wb") as file:
            file.write(LINES)
        for _ in range(2):
            assert rows_of(JsonLines(path)) == rows_of(JsonLines(path)) != []
            assert packed_of(path)


def test_much_that_is_damaged_is_told_in_a_few_lines(tmp_path, caplog):
    def make(numbers):
        for number in numbers:
            kept.write(str(tmp_path), f"{number}", {"number": number}, {})

    names = [f"{number}" for number in range(20)]
    kept.entries(str(tmp_path), names, make)
    for number in range(11):
        flipped(tmp_path / f"{number}.json")
    with caplog.at_level(logging.WARNING):
        actual = kept.entries(str(tmp_path), names, make)
    assert [item.values["number"] for item in actual] == list(range(20))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 4 and lines[0].startswith("0 in ") and lines[3] == "and 8 more"


def test_what_killed_processes_left_is_removed(tmp_path):
    (tmp_path / ".7.0123.partial").write_text("")
    with kept.locked(str(tmp_path)):
        assert not list(tmp_path.glob(".*"))
