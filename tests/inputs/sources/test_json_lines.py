"""JSON lines: objects as they are in the files, plain or compressed, and lines that are none."""

import codecs
import gzip
import json
import os
import pathlib
import subprocess
import sys
import threading

import grain
import numpy as np
import pyarrow
import pytest

from praxis_lite.core.errors import ConfigError
from praxis_lite.inputs import JsonLines
from praxis_lite.inputs.sources import json_lines
from praxis_lite.inputs.sources.faults import BadExample


@pytest.mark.parametrize(("line", "fault", "found"), [
    (b"{", "not_json", r"JSON.*\(char 2\)"),
    (b"[7]", "not_json", r"\[7\];"),
    (b"null", "not_json", "null;"),
    (b'{"n": 1, "m": [{"k": 1, "k": 2}]}', "not_json", "'k'"),
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
    assert (source[0], source[2]) == ({"n": 0}, {"n": 2})


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
    for cut in (*range(1, 30, 7), *range(30, len(data), 401), len(data) - 8, len(data) - 1):
        path.write_bytes(data[:cut])
        with pytest.raises(BadExample, match="a.jsonl.gz is truncated"):
            JsonLines(str(path)).check()
        rest = JsonLines(str(path), skip=("truncated",))
        rest.check()
        last = len(rest) - 1
        assert [rest[n]["n"] for n in range(last)] == list(range(last))
        with pytest.raises(BadExample, match="a.jsonl.gz is truncated"):
            rest[last]


def test_what_grain_reads_of_a_file_that_is_cut_off_is_not_just_less(tmp_path):
    """Grain calls no `check`."""
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"n": 1}\n' * 99)[:-4])
    with pytest.raises(BadExample, match="a.jsonl.gz"):
        list(grain.MapDataset.source(JsonLines(str(path))))


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


def test_rows_keep_their_keys_and_types_that_no_column_could_have(tmp_path):
    rows = [
        {"content": "a", "n": 1},
        {"content": [{"type": "text", "text": "b"}], "n": 1.0},
        {"arguments": {"x": None}},
        {"arguments": "{}", "n": None},
        {"n": 2**70},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = JsonLines(f"{tmp_path}/a.jsonl")
    assert [json.dumps(source[n]) for n in range(5)] == [json.dumps(row) for row in rows]


@pytest.mark.slow
def test_a_copy_needs_neither_home_nor_network_and_later_starts_not_even_datasets(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"n": 1}\n')
    script = (
        f"import socket, sys; sys.path[:0] = {sys.path!r}\n"
        "def refuse(*args): raise AssertionError(args)\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "from praxis_lite.inputs import JsonLines\n"
        f"assert JsonLines({str(tmp_path / 'a.jsonl')!r})[0] == {{'n': 1}}\n"
        "print(sorted({'datasets', 'jax', 'tensorflow', 'torch'} & sys.modules.keys()))\n"
    )
    for expected in ("['datasets']\n", "[]\n"):
        ended = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "HOME": str(tmp_path / "home")},
            capture_output=True,
            text=True,
        )
        assert (ended.returncode, ended.stderr, ended.stdout) == (0, "", expected)
    assert not (tmp_path / "home").exists()
