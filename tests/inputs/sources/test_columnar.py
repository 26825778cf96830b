"""Parquet and Arrow files: cells, columns, compressed files, and what is wrong with them."""

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


def test_cells_are_what_python_and_numpy_have(tmp_path):
    pyarrow.parquet.write_table(
        pyarrow.table(
            {
                "fixed": pyarrow.array([[1, 2], [3, 4]], pyarrow.list_(pyarrow.float32(), 2)),
                "ids": pyarrow.array([[7], []], pyarrow.large_list(pyarrow.int32())),
                "words": [["a", "b"], []],
                "holes": [[1, None], [3]],
                "word": pyarrow.array(["a", None]).dictionary_encode(),
                "bytes": [b"\xff", None],
                "none": [None, None],
                "messages": [[{"role": "user", "name": None}], [{"role": "tool", "name": "f"}]],
            }
        ),
        tmp_path / "a.parquet",
    )
    actual, last = map(Parquet(f"{tmp_path}/a.parquet").__getitem__, range(2))
    assert actual.pop("fixed").tolist() == [1, 2] and actual["ids"].dtype == np.int32
    assert actual.pop("ids").tolist() == [7]
    assert actual == {
        "words": ["a", "b"],
        "word": "a",
        "bytes": b"\xff",
        "holes": [1, None],
        "none": None,
        "messages": [{"role": "user"}],
    }
    assert (last["word"], last["bytes"], last["ids"].tolist()) == (None, None, [])
    assert last["messages"] == [{"role": "tool", "name": "f"}]


@pytest.mark.parametrize("compression", ["lz4", "zstd", "uncompressed"])
def test_feather_files_are_read_compressed_or_not(compression, table, tmp_path):
    feather.write_feather(table, f"{tmp_path}/a.arrow", compression=compression, chunksize=301)
    source = ArrowFiles(f"{tmp_path}/a.arrow")
    expected = table.to_pylist()
    for n in np.random.default_rng(0).permutation(ROWS).tolist():
        assert source[n] == expected[n]


def test_files_of_other_columns_are_named_and_the_order_of_columns_does_not_matter(tmp_path):
    for name, columns in (("a", {"x": [1], "s": ["a"]}), ("b", {"s": ["b"], "x": [2]})):
        pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / f"{name}.parquet")
    source = Parquet(f"{tmp_path}/*.parquet")
    assert [source[n] for n in range(2)] == [{"x": 1, "s": "a"}, {"x": 2, "s": "b"}]
    pyarrow.parquet.write_table(pyarrow.table({"x": [3], "y": [4]}), tmp_path / "c.parquet")
    with pytest.raises(ConfigError, match="c.parquet has the columns x: int64, y.*a.parquet"):
        Parquet(f"{tmp_path}/*.parquet").check()
    assert Parquet(f"{tmp_path}/*.parquet", columns=("x",))[2] == {"x": 3}


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


def test_damage_is_named(table, tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(table, path, compression="none", write_page_checksum=True)
    data = bytearray(path.read_bytes())
    data[data.index(b"text 500")] ^= 1  # Text that is text as well: a checksum alone can tell.
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="a.parquet.*CRC"):
        Parquet(f"{path}").check()


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
    assert (source[0]["day"].year, source[2]["day"].day) == (1970, 2)
    with pytest.raises(BadExample, match="a.parquet, row 1") as caught:
        source[1]
    assert caught.value.fault == "damaged"


def test_a_text_that_is_not_utf8_is_left_out_alone(tmp_path):
    binary = pyarrow.array([b"a", b"\xff", b"c"])
    strings = pyarrow.Array.from_buffers(pyarrow.string(), 3, binary.buffers())
    pyarrow.parquet.write_table(pyarrow.table({"s": strings}), tmp_path / "a.parquet")
    source = Parquet(f"{tmp_path}/a.parquet", skip=("not_utf8",))
    assert (source[0], source[2]) == ({"s": "a"}, {"s": "c"})
    with pytest.raises(BadExample, match="a.parquet.*1.*UTF-8") as caught:
        source[1]
    assert caught.value.fault == "not_utf8"
