"""A reader sees a file complete, however many processes write it at once."""

import concurrent.futures
import os

import pytest

from praxis_lite import ConfigError
from praxis_lite.host.atomic_files import write_atomically

CONTENTS = [bytes([65 + number]) * (5_000 + 40_000 * number) for number in range(4)]


def test_of_many_that_write_a_file_at_once_each_writes_it_whole(tmp_path):
    path = tmp_path / "page.html"
    path.write_bytes(CONTENTS[0])

    def writes(content):
        seen = []
        for _ in range(15):
            write_atomically(path, content)
            seen.append(path.read_bytes())
        return seen

    with concurrent.futures.ThreadPoolExecutor(len(CONTENTS)) as pool:
        seen = [content for result in pool.map(writes, CONTENTS) for content in result]
    assert set(seen) <= set(CONTENTS) and len(seen) == 15 * len(CONTENTS)
    assert os.listdir(tmp_path) == ["page.html"]


def test_where_a_folder_lies_in_its_way_it_stays_and_nothing_is_left(tmp_path):
    path = tmp_path / "a.json"
    path.mkdir()
    with pytest.raises(ConfigError, match=r"a\.json"):
        write_atomically(path, b"2")
    assert path.is_dir() and os.listdir(tmp_path) == ["a.json"]
