"""Parquet and Arrow files: cells, copies, compressed ones, and what is wrong with them."""

import os
import pickle

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from pyarrow import feather, ipc

from praxis_lite.core.errors import ConfigError
from praxis_lite.inputs import ArrowFiles, Parquet
from praxis_lite.inputs.sources.faults import BadExample

ROWS = 997


@pytest.fixture
def table():
    return pyarrow.table({"n": range(ROWS), "s": [f"text {n} " * (n % 13) for n in range(ROWS)]})


def rows_of(source):
    return [item for _, item in source.read(0, len(source))]


def copies(folder):
    actual = (folder / ".praxis_lite").glob("*.copy.arrow")
    return sorted((path.name, path.stat().st_ino) for path in actual)


def test_cells_are_what_python_and_numpy_have(tmp_path):
    pyarrow.parquet.write_table(
        pyarrow.table({
            "fixed": pyarrow.array([[1, 2], [3, 4]], pyarrow.list_(pyarrow.float32(), 2)),
            "ids": pyarrow.array([[7], []], pyarrow.large_list(pyarrow.int32())),
            "words": [["a", "b"], []], "holes": [[1, None], [3]],
            "word": pyarrow.array(["a", None]).dictionary_encode(),
            "bytes": [b"\xff", None],
        }),
        tmp_path / "a.parquet",
    )
    for read in (lambda source: source[0], lambda source: rows_of(source)[0]):
        actual = read(Parquet(f"{tmp_path}/a.parquet"))
        assert actual.pop("fixed").tolist() == [1, 2] and actual["ids"].dtype == np.int32
        assert actual.pop("ids").tolist() == [7]
        assert actual == {
            "words": ["a", "b"], "word": "a", "bytes": b"\xff", "holes": [1, None],
        }
    last = Parquet(f"{tmp_path}/a.parquet")[1]
    assert (last["word"], last["bytes"], last["ids"].tolist()) == (None, None, [])


def test_a_copy_is_made_when_a_row_is_asked_for_by_number_and_not_before(table, tmp_path, caplog):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(table, path, row_group_size=300)
    source = Parquet(f"{path}")
    assert rows_of(source) == table.to_pylist() and copies(tmp_path) == []
    with caplog.at_level("INFO"):
        assert source[701] == table.to_pylist()[701]
    assert "to find any row" in caplog.text
    (first,) = copies(tmp_path)
    pickle.loads(pickle.dumps(source))[3]
    assert copies(tmp_path) == [first]
    # A change that the digest of a large file would not notice: it looks at 64 blocks.
    os.utime(path, ns=(1, 1))
    again = Parquet(f"{path}")
    assert again[996] == table.to_pylist()[996]
    (second,) = copies(tmp_path)
    assert second != first


def test_a_row_group_is_decoded_once_for_all_its_parts(table, tmp_path, monkeypatch):
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=600)
    groups, read = [], pyarrow.parquet.ParquetFile.read_row_group
    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "read_row_group", lambda self, group, **how: (
        groups.append((group, how["columns"])), read(self, group, **how))[1])
    source = Parquet(f"{tmp_path}/a.parquet", columns=("n",))
    actual = []
    for start in range(0, ROWS, 97):
        actual += [x["n"] for _, x in source.read(start, min(start + 97, ROWS))]
    assert actual == list(range(ROWS))
    assert groups == [(0, ["n"]), (1, ["n"])] and source._last_group == {}


@pytest.mark.parametrize("compression", ["lz4", "zstd", "uncompressed"])
def test_a_compressed_file_is_mapped_as_a_copy_that_is_not(compression, table, tmp_path):
    feather.write_feather(table, f"{tmp_path}/a.arrow", compression=compression, chunksize=301)
    source = ArrowFiles(f"{tmp_path}/a.arrow")
    order = np.random.default_rng(0).permutation(ROWS).tolist()
    source[0]
    before = pyarrow.total_allocated_bytes()
    expected = table.to_pylist()
    assert [source[n] for n in order] == [expected[n] for n in order]
    assert pyarrow.total_allocated_bytes() - before < table.nbytes // 10
    assert len(copies(tmp_path)) == (compression != "uncompressed")


def test_dictionaries_may_differ_in_the_parts_of_a_file(tmp_path):
    parts = [
        pyarrow.table({"word": pyarrow.array([f"word {n}"] * 20).dictionary_encode()})
        for n in range(5)
    ]
    with pyarrow.parquet.ParquetWriter(tmp_path / "a.parquet", parts[0].schema) as file:
        for part in parts:
            file.write_table(part)
    options = ipc.IpcWriteOptions(compression="zstd")
    with ipc.new_stream(f"{tmp_path}/b.arrow", parts[0].schema, options=options) as file:
        for part in parts:
            file.write_table(part)
    for source in (Parquet(f"{tmp_path}/a.parquet"), ArrowFiles(f"{tmp_path}/b.arrow")):
        assert [source[n]["word"] for n in (99, 0, 50)] == ["word 4", "word 0", "word 2"]


def test_columns_are_checked_before_anything_is_read(table, tmp_path):
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"a.parquet.*'nn'.*\['n'.*'s'\]"):
        Parquet(f"{tmp_path}/a.parquet", columns=("s", "nn")).check()
    with pytest.raises(ConfigError, match=r"Parquet\.columns.*'s'"):
        Parquet(f"{tmp_path}/a.parquet", columns="s").check()
    assert copies(tmp_path) == []


def test_damage_is_named(table, tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(table, path, compression="none", write_page_checksum=True)
    data = bytearray(path.read_bytes())
    data[data.index(b"text 500")] ^= 1  # Text that is text as well: a checksum alone can tell.
    path.write_bytes(data)
    source = Parquet(f"{path}")
    source.check()
    for read in (rows_of, lambda source: source[7]):
        with pytest.raises(ConfigError, match="a.parquet.*CRC"):
            read(source)
    with ipc.new_stream(f"{tmp_path}/b.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=100)
    data = (tmp_path / "b.arrow").read_bytes()
    (tmp_path / "b.arrow").write_bytes(data[:-8])  # At the end of a record batch.
    with pytest.raises(ConfigError, match="b.arrow"):
        ArrowFiles(f"{tmp_path}/b.arrow").check()


def test_offsets_that_are_damaged_are_refused_and_end_no_process(table, tmp_path):
    with ipc.new_file(f"{tmp_path}/a.arrow", table.schema) as file:
        file.write_table(table)
    data = bytearray((tmp_path / "a.arrow").read_bytes())
    offset = data.index(table["s"].chunk(0).buffers()[1].to_pybytes()[:64])
    data[offset + 403] = 0x7F
    (tmp_path / "a.arrow").write_bytes(data)
    with pytest.raises(ConfigError, match="a.arrow"):
        ArrowFiles(f"{tmp_path}/a.arrow").check()


def test_a_cell_that_python_has_no_value_for_is_left_out_alone(tmp_path):
    days = pyarrow.array([0, 2**31 - 1, 1], pyarrow.int32()).cast(pyarrow.date32())
    pyarrow.parquet.write_table(pyarrow.table({"day": days}), tmp_path / "a.parquet")
    source = Parquet(f"{tmp_path}/a.parquet", skip=("damaged",))
    first, bad, last = rows_of(source)
    assert (first["day"].year, bad.fault, last["day"].day) == (1970, "damaged", 2)
    with pytest.raises(BadExample, match="a.parquet.*1"):
        source[1]


@pytest.mark.parametrize("end", ["parquet", "arrow"])
def test_names_of_columns_that_are_no_names_are_refused(end, tmp_path):
    for name, match in (("x", " x;"), ("name", "utf-8")):
        table, path = pyarrow.table([[1], [2]], ["x", name]), tmp_path / f"a.{end}"
        if end == "parquet":
            pyarrow.parquet.write_table(table, path)
        else:
            with ipc.new_file(str(path), table.schema) as file:
                file.write_table(table)
        path.write_bytes(path.read_bytes().replace(b"name", b"n\xe9me"))
        with pytest.raises(ConfigError, match=f"a.{end}.*{match}"):
            (Parquet if end == "parquet" else ArrowFiles)(str(path)).check()


def test_a_text_that_is_not_utf8_is_left_out_alone(tmp_path):
    binary = pyarrow.array([b"a", b"\xff", b"c"])
    strings = pyarrow.Array.from_buffers(pyarrow.string(), 3, binary.buffers())
    pyarrow.parquet.write_table(pyarrow.table({"s": strings}), tmp_path / "a.parquet")
    source = Parquet(f"{tmp_path}/a.parquet", skip=("not_utf8",))
    first, bad, last = rows_of(source)
    assert (first, bad.fault, last) == ({"s": "a"}, "not_utf8", {"s": "c"})
    with pytest.raises(BadExample, match="a.parquet.*1.*UTF-8"):
        source[1]
