"""Every source of examples: each row is what another writer wrote, in any order, and checked.

What holds of all of them is one set of tests; what a format does besides stands below.
"""

import gzip
import itertools
import json
import os
import pickle
import re
import struct
from collections import Counter

import grain
import numpy as np
import pyarrow
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from praxis_lite.core.errors import ConfigError
from praxis_lite.inputs import (
    ArrayRecords,
    ArrowFiles,
    FromGrain,
    FromSource,
    JsonLines,
    Mixture,
    NpyFiles,
    Parquet,
    TfRecords,
)
from praxis_lite.inputs.base import batches_sha256
from praxis_lite.inputs.pipeline_checks import check_data
from praxis_lite.inputs.sources import in_place_files
from praxis_lite.inputs.sources.faults import BadExample

ROWS = 600


def row(number):
    return {"n": number, "text": f"text {number} é" * (number % 3 + 1)}


def lines(start, stop):
    return "".join(json.dumps(row(n)) + "\n" for n in range(start, stop)).encode()


def table(start, stop):
    import pyarrow

    return pyarrow.Table.from_pylist([row(n) for n in range(start, stop)])


def record(number):
    return json.dumps(row(number)).encode()


def tf_record(data):
    """Returns a record of a TFRecord file, framed by hand."""
    import google_crc32c

    def masked(x):
        crc = google_crc32c.value(x)
        return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)

    length = struct.pack("<Q", len(data))
    return length + masked(length) + data + masked(data)


def write_zst(path, start, stop):
    import pyarrow

    def compressed(data):
        codec = pyarrow.Codec("zstd")
        return codec.compress(data, asbytes=True)

    middle = (start + stop) // 2  # Two frames: one of a file that is cut off can be read.
    path.write_bytes(compressed(lines(start, middle)) + compressed(lines(middle, stop)))


def write_parquet(path, start, stop):
    import pyarrow.parquet

    pyarrow.parquet.write_table(table(start, stop), path, row_group_size=70)


def write_arrow(path, start, stop):
    from pyarrow import ipc

    make = ipc.new_file if start else ipc.new_stream  # One of each.
    with make(str(path), table(start, stop).schema) as file:
        file.write_table(table(start, stop), max_chunksize=90)


def write_array_record(path, start, stop):
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for n in range(start, stop):
        writer.write(record(n))
    writer.close()


def write_tf_records(path, start, stop):
    data = b"".join(tf_record(record(n)) for n in range(start, stop))
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


KINDS = {
    "jsonl": (JsonLines, "jsonl", lambda path, a, b: path.write_bytes(lines(a, b)), {}),
    "jsonl.gz": (
        JsonLines,
        "jsonl.gz",
        lambda path, a, b: path.write_bytes(gzip.compress(lines(a, b))),
        {},
    ),
    "jsonl.zst": (JsonLines, "jsonl.zst", write_zst, {}),
    "parquet": (Parquet, "parquet", write_parquet, {}),
    "arrow": (ArrowFiles, "arrow", write_arrow, {}),
    "array_record": (ArrayRecords, "array_record", write_array_record, {"decode": json.loads}),
    "tfrecord": (TfRecords, "tfrecord", write_tf_records, {"decode": json.loads}),
    "tfrecord.gz": (TfRecords, "tfrecord.gz", write_tf_records, {"decode": json.loads}),
    "npz": (
        NpyFiles,
        "npz",
        lambda path, a, b: np.savez(
            path, n=np.arange(a, b), text=np.array([row(n)["text"] for n in range(a, b)])
        ),
        {},
    ),
}


def source_of(kind, folder, **settings):
    source, end, _, local = KINDS[kind]
    return source(f"{folder}/*.{end}", **local, **settings)


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def folder(kind, tmp_path_factory):
    """Two files: 250 rows, and the others."""
    folder = tmp_path_factory.mktemp("source")
    _, end, write, _ = KINDS[kind]
    write(folder / f"a.{end}", 0, 250)
    write(folder / f"b.{end}", 250, ROWS)
    return folder


def plain(example):
    return {"n": int(example["n"]), "text": str(example["text"])}


def test_every_row_is_what_was_written_in_any_order(kind, folder):
    source = source_of(kind, folder)
    source.check()
    assert len(source) == ROWS
    for number in np.random.default_rng(0).permutation(ROWS).tolist():
        assert plain(source[number]) == row(number)
    assert [(p.start, p.stop) for p in source.parts()] == [(0, 250), (250, ROWS)]
    assert pickle.loads(pickle.dumps(source))[333] == source[333]
    assert os.path.basename(source.where(251)).startswith(f"b.{KINDS[kind][1]}")
    with pytest.raises(IndexError):
        source[ROWS]


def test_a_changed_file_is_read_again_and_a_fingerprint_has_contents_but_no_folder(
    kind, folder, tmp_path
):
    _, end, write, _ = KINDS[kind]
    for path in folder.glob(f"*.{end}"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    first = source_of(kind, tmp_path)
    first.check()
    assert first.fingerprint() == source_of(kind, folder).fingerprint()
    write(tmp_path / f"b.{end}", 250, ROWS + 5)
    again = source_of(kind, tmp_path)
    assert len(again) == ROWS + 5 and plain(again[ROWS]) == row(ROWS)
    old, new = first.fingerprint()["files"], again.fingerprint()["files"]
    assert [name for name in old if old[name] != new[name]] == [f"b.{end}"]
    assert first.parts()[0] == again.parts()[0] and first.parts()[1:] != again.parts()[1:]


@pytest.mark.parametrize("kind", ["npz", "array_record"])
def test_a_file_that_is_read_in_place_and_changed_since_is_named(kind, tmp_path):
    _, end, write, _ = KINDS[kind]
    write(tmp_path / f"a.{end}", 0, 9)
    source = source_of(kind, tmp_path)
    source.check()
    sent = pickle.dumps(source)
    write(tmp_path / f"a.{end}", 0, 7)
    with pytest.raises(ConfigError, match=f"a.{end} has changed"):
        pickle.loads(sent)[3]
    (tmp_path / f"a.{end}").unlink()
    with pytest.raises(ConfigError, match=f"a.{end}"):
        pickle.loads(sent)[3]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_are_copied_once_for_all_processes_and_mapped(kind, tmp_path, monkeypatch):
    source, end, write, _ = KINDS[kind]
    write(tmp_path / f"a.{end}", 0, ROWS)
    monkeypatch.setattr(source, "tables", counted := Counted(source.tables))
    first = source_of(kind, tmp_path)
    first.check()
    before = pyarrow.total_allocated_bytes()
    again = pickle.loads(pickle.dumps(source_of(kind, tmp_path)))
    assert plain(again[599]) == row(599) and counted.calls == 1
    assert pyarrow.total_allocated_bytes() - before < first.table.nbytes // 10


class Counted:
    """A method that counts its calls."""

    def __init__(self, method):
        self.method, self.calls = method, 0

    def __get__(self, instance, owner):
        def call(path):
            self.calls += 1
            return self.method(instance, path)

        return self if instance is None else call


def test_a_damaged_copy_is_named_with_its_folder(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(0, 50))
    JsonLines(f"{tmp_path}/a.jsonl").check()
    (copy,) = (tmp_path / ".praxis_lite").rglob("*.arrow")
    copy.write_bytes(copy.read_bytes()[:-300])
    with pytest.raises(ConfigError, match=f"a.jsonl in {tmp_path}/.praxis_lite cannot be read"):
        JsonLines(f"{tmp_path}/a.jsonl").check()


def test_many_small_files_share_parts_and_are_not_all_open(kind, tmp_path, monkeypatch):
    _, end, write, _ = KINDS[kind]
    for number in range(103):
        write(tmp_path / f"{number:03}.{end}", 2 * number, 2 * number + 2)
    monkeypatch.setattr(in_place_files, "_MAX_OPEN", 5)
    source = source_of(kind, tmp_path)
    assert [plain(source[k]) for k in range(len(source))] == [row(n) for n in range(206)]
    assert [p.stop - p.start for p in source.parts()] == [206]
    assert len(vars(source).get("_open", ())) <= 5
    assert list(source.fingerprint()["files"]) == [f"{number:03}.{end}" for number in range(103)]


def test_a_file_that_is_cut_off_is_named(kind, folder, tmp_path):
    _, end, _, _ = KINDS[kind]
    data = (folder / f"b.{end}").read_bytes()
    (tmp_path / f"b.{end}").write_bytes(data[: 2 * len(data) // 3 - 1])
    if kind == "jsonl":  # Lines tell nothing of those that are lost, but the last is no whole one.
        cut = source_of(kind, tmp_path)
        with pytest.raises(BadExample, match="b.jsonl:[0-9]+ .*JSON"):
            cut[len(cut) - 1]
        return
    with pytest.raises(ConfigError, match=f"b.{end} (is truncated or damaged|cannot be read)"):
        source_of(kind, tmp_path).check()
    if kind in ("jsonl.gz", "jsonl.zst", "tfrecord", "tfrecord.gz"):
        # What is missing counts as an example.
        rest = source_of(kind, tmp_path, skip=["truncated"])
        rest.check()
        left_out, (part,) = Counter(), rest.parts()
        numbers = [n for n, _ in rest.map_part(part, lambda x, n: (x, n), left_out)]
        assert numbers == list(range(len(rest) - 1)) and left_out == {"truncated": 1}
        assert 0 < len(numbers) < 350 and plain(rest[len(numbers) - 1]) == row(249 + len(numbers))


def test_a_source_is_one_of_grain(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(0, 50))
    actual = FromGrain(_Dataset(f"{tmp_path}/*.jsonl"), 5)
    assert sorted(next(actual.batches())["n"].tolist()) != [0, 1, 2, 3, 4]


class _Dataset:
    def __init__(self, files):
        self.files = files

    def __call__(self):
        dataset = grain.MapDataset.source(JsonLines(self.files)).seed(0).shuffle()
        return dataset.map(lambda example: {"n": example["n"]})


def test_blank_lines_count_for_no_row_but_for_the_number_of_a_line(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\n{"n": 1}\r\n \n\n{"n": 2}\n{"n": \xff}')
    source = JsonLines(f"{tmp_path}/a.jsonl")
    assert [source[k]["n"] for k in range(2)] == [1, 2] and len(source) == 3
    with pytest.raises(BadExample, match="a.jsonl:6.*UTF-8"):
        source[2]


def test_a_checksum_that_is_wrong_is_named_with_its_row(tmp_path):
    path = tmp_path / "a.tfrecord"
    write_tf_records(path, 0, 5)
    data = bytearray(path.read_bytes())
    data[len(tf_record(record(0))) + 20] ^= 1
    path.write_bytes(data)
    source = TfRecords(str(path), decode=json.loads)
    assert plain(source[0]) == row(0)
    with pytest.raises(BadExample, match="a.tfrecord.*1"):
        source[1]


def is_odd(example):
    return example["n"] % 2 == 1


def squared(example):
    return {"x": np.full(3, example["n"] ** 2)}


def test_batches_of_a_source_are_filtered_once_and_the_same_for_any_hosts(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(0, 50))

    def batches(**settings):
        return FromSource(
            JsonLines(f"{tmp_path}/*.jsonl"), 4, squared, is_odd, shuffle=True, **settings
        )

    actual = list(itertools.islice(batches().batches(), 20))
    rows = np.concatenate([item["x"] for item in actual])
    expected = sorted(n**2 for n in range(1, 50, 2))
    assert sorted(rows[:25, 0].tolist()) == expected and sorted(rows[25:50, 2].tolist()) == expected
    assert batches().left_out == {"filtered": 25} and batches().num_batches is None
    for start, hosts in ((3, 2), (7, 4)):
        parts = [
            list(itertools.islice(batches().batches(start, rows=slice(k, k + 4 // hosts)), 3))
            for k in range(0, 4, 4 // hosts)
        ]
        result = [
            {n: np.concatenate([x[n] for x in same]) for n in same[0]}
            for same in zip(*parts, strict=True)
        ]
        assert batches_sha256(result) == batches_sha256(actual[start : start + 3])
    assert batches().fingerprint() != batches(seed=1).fingerprint()


@pytest.mark.parametrize(
    ("odd", "found"),
    [
        ({"x": [5, 6]}, r"FILE:3 has the keys \['x'\], but FILE:1 has \['x', 'y'\]"),
        ({"x": [5], "y": 7}, r"'x' has the shape \(1,\) in FILE:3, but \(2,\) in FILE:1"),
        ({"x": [5, 6], "y": "7"}, "FILE:3: the array 'y' has the dtype <U1"),
    ],
)
def test_an_example_that_does_not_fit_into_a_batch_is_named(odd, found, tmp_path):
    file = tmp_path / "a.jsonl"
    rows = [{"x": [1, 2], "y": 3}, {"x": [3, 4], "y": 5}, odd]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with pytest.raises(ConfigError, match=found.replace("FILE", re.escape(str(file)))):
        next(FromSource(JsonLines(str(file)), 3, shuffle=False).batches())


def test_an_example_without_the_name_a_transform_wants_is_named_or_skipped(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(0, 2) + b'{"m": 1}\n' + lines(3, 5))
    with pytest.raises(BadExample, match=r"a.jsonl:3.*'n'.*\['m'\]"):
        list(FromSource(JsonLines(f"{tmp_path}/*"), 1, squared, shuffle=False).batches())
    some = FromSource(JsonLines(f"{tmp_path}/*", skip=["missing_key"]), 1, squared, shuffle=False)
    assert [b["x"][0, 0] for b in some.batches()] == [0, 1, 9, 16]
    assert some.left_out == {"missing_key": 1}


def test_a_fault_that_can_be_skipped_is_told_with_the_whole_path_of_the_setting(tmp_path):
    for name, text in (("a", b'{"n": 1}\n'), ("b", b"no json\n")):
        (tmp_path / f"{name}.jsonl").write_bytes(text)

    def batches(name):
        source = JsonLines(f"{tmp_path}/{name}.jsonl")
        return FromSource(source, 1, squared, is_odd, shuffle=True)

    mixed = Mixture({"one": batches("a"), "two": batches("b")}, {"one": 1, "two": 1}, 1)
    for pipeline, path in ((batches("b"), "source"), (mixed, "sources.two.source")):
        expected = f"b.jsonl:1 .*JSON.* --set datasets.train.{path}.skip=\"\\['not_json'\\]\"$"
        with pytest.raises(ConfigError, match=expected):
            check_data(pipeline, "datasets.train")


def test_a_folder_that_cannot_be_written_is_named_with_what_to_set(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(0, 5))
    (tmp_path / "file").write_text("")
    source = JsonLines(f"{tmp_path}/a.jsonl", cache_dir=f"{tmp_path}/file/below")
    with pytest.raises(ConfigError, match="file/below"):
        source.check()


def test_files_that_a_function_makes_are_made_once_and_whole(tmp_path):
    calls = []

    def make(folder):
        calls.append(folder)
        for name in ("a.jsonl", "b.jsonl"):
            (tmp_path / "new").joinpath(folder, name).write_bytes(lines(0, 5))

    for _ in range(2):
        source = JsonLines(f"{tmp_path}/new/*.jsonl", make=make)
        assert len(source) == 10
    assert len(calls) == 1
