"""What is derived from data is stored once, and complete or not at all."""

import threading

import numpy as np
import pytest

from praxis_lite.core.errors import ConfigError
from praxis_lite.inputs.sources import cache

VALUES = {"num_examples": 3, "words": ["a", "é"]}
ARRAYS = {"starts": np.arange(7), "none": np.zeros((0, 3), np.float32), "x": np.ones(300_000)}


def test_an_entry_is_read_as_it_was_written_with_large_arrays_mapped(tmp_path):
    cache.write(str(tmp_path), "one", VALUES, ARRAYS)
    values, arrays, digests = cache.read(str(tmp_path), "one")
    assert values == VALUES and digests.keys() == ARRAYS.keys()
    np.testing.assert_equal(arrays, ARRAYS)
    assert arrays["none"].dtype == np.float32 and isinstance(arrays["x"].base, np.memmap)
    assert cache.read(str(tmp_path), "two") is None


def test_threads_and_later_calls_make_each_entry_once(tmp_path):
    made, names = [], ["a", "b", "c"]

    def make(numbers):
        for number in numbers:
            made.append(names[number])
            cache.write(str(tmp_path), names[number], {"n": number}, {})

    cache.entries(str(tmp_path), names[1:2], lambda _: make([1]))
    threads = [
        threading.Thread(target=cache.entries, args=(str(tmp_path), names, make)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == ["b", "a", "c"]
    result = cache.entries(str(tmp_path), names, make)
    assert [entry.values["n"] for entry in result] == [0, 1, 2]


def test_what_is_not_written_to_its_end_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="pickle"):
        cache.write(str(tmp_path), "one", {}, {"x": np.arange(3), "y": np.array([{}])})
    assert cache.read(str(tmp_path), "one") is None


def test_a_damaged_entry_is_named(tmp_path):
    cache.write(str(tmp_path), "one", VALUES, ARRAYS)
    path = tmp_path / "one/x.npy"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=f"{tmp_path}/one.*Delete it"):
        cache.read(str(tmp_path), "one")
