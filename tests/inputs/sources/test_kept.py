"""What is kept on disk: there whole, or made again."""

import json
import logging

import numpy as np
import pytest

from praxis_lite.errors import ConfigError
from praxis_lite.inputs import JsonLines
from praxis_lite.inputs.sources import kept

VALUES = {"num_examples": 3, "words": ["a", "é"]}
ARRAYS = {"starts": np.arange(7), "none": np.zeros((0, 3), np.float32)}


@pytest.fixture
def folder(tmp_path):
    kept.write(str(tmp_path), "one", VALUES, ARRAYS)
    return tmp_path


def test_it_is_read_as_it_was_written(folder):
    values, arrays = kept.read(str(folder), "one")
    assert values == VALUES
    np.testing.assert_equal(arrays, ARRAYS)
    assert arrays["none"].shape == (0, 3) and arrays["none"].dtype == np.float32
    assert kept.read(str(folder), "two") is None
    assert not kept.is_damaged(str(folder), "one")


def cut_json(folder):
    text = (folder / "one.json").read_text()
    (folder / "one.json").write_text(text[:30])


def empty_json(folder):
    (folder / "one.json").write_text("")


def other_json(folder):
    (folder / "one.json").write_text("[7]")


def cut_array(folder):
    data = (folder / "one.starts.npy").read_bytes()
    (folder / "one.starts.npy").write_bytes(data[:-1])


def no_array(folder):
    (folder / "one.starts.npy").unlink()


def no_header(folder):
    data = (folder / "one.starts.npy").read_bytes()
    (folder / "one.starts.npy").write_bytes(b"x" * len(data))


def other_version(folder):
    content = json.loads((folder / "one.json").read_text())
    (folder / "one.json").write_text(json.dumps(content | {"version": 0}))


HARMS = [cut_json, empty_json, other_json, cut_array, no_array, no_header, other_version]


@pytest.mark.parametrize("harm", HARMS)
def test_what_is_not_whole_is_read_as_nothing(harm, folder, caplog):
    harm(folder)
    with caplog.at_level(logging.WARNING):
        assert kept.read(str(folder), "one") is None
    # Another version, or an array that was removed, is no damage.
    assert ("it is made again" in caplog.text) == (harm not in (no_array, other_version))


def test_other_bytes_of_the_same_length_are_damage(folder):
    data = bytearray((folder / "one.starts.npy").read_bytes())
    data[-3] ^= 1
    (folder / "one.starts.npy").write_bytes(data)
    assert kept.is_damaged(str(folder), "one")


@pytest.mark.parametrize("harm", HARMS)
def test_an_index_that_is_not_whole_is_made_again(harm, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"n": 1}\n{"n": 2}\n')
    JsonLines(f"{tmp_path}/a.jsonl").check()
    (made,) = (tmp_path / ".praxis_lite").glob("*.json")
    for path in (tmp_path / ".praxis_lite").glob(f"{made.stem}.*"):
        path.rename(path.with_name(path.name.replace(made.stem, "one")))
    harm(tmp_path / ".praxis_lite")
    for path in (tmp_path / ".praxis_lite").glob("one.*"):
        path.rename(path.with_name(path.name.replace("one", made.stem)))
    source = JsonLines(f"{tmp_path}/a.jsonl")
    assert [source[k]["n"] for k in range(2)] == [1, 2]


def test_a_disk_that_does_not_take_it_is_told(folder):
    with pytest.raises(ConfigError, match="could not be written"):
        kept.write(str(folder / "none"), "one", VALUES, ARRAYS)
