"""JSON lines: what is read of a file, compressed files' copies, and lines that are no example."""

import codecs
import gzip
import json
import pathlib
import threading

import grain
import numpy as np
import pyarrow
import pytest

from praxis_lite.core.errors import ConfigError
from praxis_lite.inputs import JsonLines
from praxis_lite.inputs.sources import json_lines
from praxis_lite.inputs.sources.faults import BadExample
from tests.support.reads import counted_reads


def test_one_row_reads_its_own_bytes_alone(tmp_path, monkeypatch):
    lines = [json.dumps({"n": n, "text": "é" * (n % 17)}).encode() + b"\n" for n in range(257)]
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines))
    source = JsonLines(f"{tmp_path}/a.jsonl")
    source.check()
    read = counted_reads(monkeypatch)
    assert source[131]["n"] == 131
    assert read == [(sum(map(len, lines[:131])), len(lines[131]))]


@pytest.mark.parametrize(("line", "fault", "found"), [
    (b"{", "not_json", r"JSON.*\(char 2\)"),
    (b"[7]", "not_json", r"\[7\];"),
    (b"null", "not_json", "null;"),
    (b"[" * 100_000, "not_json", "JSON.*(recursion|Stack)"),
    (b'{"text": "\xe9"}', "not_utf8", "UTF-8: .*iconv"),
])  # fmt: skip
@pytest.mark.parametrize("end", ["jsonl", "jsonl.gz"])
def test_a_line_that_is_no_example_is_named_and_others_are_read(line, fault, found, end, tmp_path):
    data = b'{"n": 0}\n\n' + line + b'\n{"n": 2}\n'
    path = tmp_path / f"a.{end}"
    path.write_bytes(gzip.compress(data) if end == "jsonl.gz" else data)
    source = JsonLines(str(path))
    source.check()
    with pytest.raises(BadExample, match=f"a.{end}:3.*{found}") as caught:
        source[1]
    assert caught.value.fault == fault and f"skip=['{fault}']" in str(caught.value)
    read = [item for _, item in source.read(0, 3)]
    assert (read[0], read[1].fault, read[2]) == ({"n": 0}, fault, {"n": 2})


@pytest.mark.parametrize("data", [b"", b"\n \n\n"])
def test_a_file_without_lines_is_told(data, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(data)
    with pytest.raises(ConfigError, match=r"\(1 files"):
        JsonLines(f"{tmp_path}/a.jsonl").check()
    (tmp_path / "b.jsonl").write_bytes(b'{"n": 1}')
    source = JsonLines(f"{tmp_path}/*.jsonl")
    source.check()
    assert len(source) == 1 and source[0] == {"n": 1}


def test_every_cut_of_a_compressed_file_is_told(tmp_path):
    data = gzip.compress(b"".join(b'{"n": %d}\n' % n for n in range(500)))
    path = tmp_path / "a.jsonl.gz"
    for cut in (*range(1, 30), *range(30, len(data), 101), len(data) - 8, len(data) - 1):
        path.write_bytes(data[:cut])
        with pytest.raises(ConfigError, match="a.jsonl.gz (is cut off|has no)"):
            JsonLines(str(path)).check()
        rest = JsonLines(str(path), skip=("truncated",))
        assert [item["n"] for _, item in rest.read(0, len(rest))] == list(range(len(rest)))
        assert rest.faults_of_files() == {"truncated": 1}


def test_what_grain_reads_of_a_file_that_is_cut_off_is_not_just_less(tmp_path):
    """Grain calls no `check`."""
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"n": 1}\n' * 99)[:-4])
    with pytest.raises(BadExample, match="a.jsonl.gz"):
        len(grain.MapDataset.source(JsonLines(str(path))))


def test_a_byte_order_mark_is_no_part_of_the_json(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(codecs.BOM_UTF8 + b'{"n": 0}\n' + codecs.BOM_UTF8)
    source = JsonLines(f"{tmp_path}/a.jsonl")
    assert source[0] == {"n": 0}
    with pytest.raises(BadExample, match="a.jsonl:2.*JSON"):
        source[1]


@pytest.mark.parametrize(("end", "codec"), [("gz", "gzip"), ("zst", "zstd")])
def test_a_compressed_file_of_another_name_is_told(end, codec, tmp_path):
    data = pyarrow.compress(b'{"n": 0}\n' * 99, codec=codec, asbytes=True)
    (tmp_path / "a.jsonl").write_bytes(data)
    with pytest.raises(BadExample, match=f"UTF-8.*.{end}"):
        JsonLines(f"{tmp_path}/a.jsonl")[0]


@pytest.mark.parametrize("files", [["a.jsonl", "b.jsonl"], pathlib.Path("a.jsonl"), None])
def test_files_are_a_text(files):
    with pytest.raises(ConfigError, match=r"JsonLines.files"):
        JsonLines(files).check()


def test_a_copy_that_is_damaged_while_it_is_in_use_is_told(tmp_path):
    rows = [{"text": np.random.default_rng(n).bytes(100).hex()} for n in range(1000)]
    (tmp_path / "a.jsonl.gz").write_bytes(
        gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode())
    )
    source = JsonLines(f"{tmp_path}/a.jsonl.gz")
    assert source[0] == rows[0]
    (copy,) = (tmp_path / ".praxis_lite").glob("*.array_record")
    data = bytearray(copy.read_bytes())
    data[70_000] ^= 1
    copy.write_bytes(data)
    with pytest.raises(ConfigError, match="a.jsonl.gz"):
        [source[n] for n in range(1000)]
    assert JsonLines(f"{tmp_path}/a.jsonl.gz")[700] == rows[700]


@pytest.mark.parametrize("end", ["", ".gz"])
def test_a_line_that_fills_the_memory_is_refused_by_its_number(end, tmp_path, monkeypatch):
    monkeypatch.setattr(json_lines, "_LONGEST", 100)
    for count in (90, 91):
        line = json.dumps({"n": "x" * count}).encode() + b"\n"
        data = b'{"n": 1}\n' + line
        (tmp_path / f"a.jsonl{end}").write_bytes(gzip.compress(data) if end else data)
        source = JsonLines(f"{tmp_path}/a.jsonl{end}")
        if len(line) > 100:
            with pytest.raises(ConfigError, match=f"a.jsonl{end}:2.*100"):
                source.check()
        else:
            assert len(source) == 2


def test_threads_read_the_same(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"".join(b'{"n": %d}\n' % n for n in range(2000)))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"n": 2000}\n' * 500))
    source, actual = JsonLines(f"{tmp_path}/*"), [[] for _ in range(4)]

    def read(k):
        for n in np.random.default_rng(k).permutation(2500).tolist():
            actual[k].append(source[n]["n"] == min(n, 2000))

    threads = [threading.Thread(target=read, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert actual == [[True] * 2500] * 4
