"""A file is whole whoever writes it, however many at once, whatever a kill left."""

import concurrent.futures
import fcntl
import os
import threading

import pytest

from praxis_lite import ConfigError
from praxis_lite.files.whole_files import write_whole

CONTENTS = [bytes([65 + number]) * (5_000 + 40_000 * number) for number in range(4)]


def test_of_many_that_write_a_file_at_once_each_writes_it_whole(tmp_path):
    path = tmp_path / "page.html"
    path.write_bytes(CONTENTS[0])

    def writes(content):
        seen = []
        for _ in range(15):
            write_whole(path, content)
            seen.append(path.read_bytes())
        return seen

    with concurrent.futures.ThreadPoolExecutor(len(CONTENTS)) as pool:
        seen = [content for result in pool.map(writes, CONTENTS) for content in result]
    assert set(seen) <= set(CONTENTS) and len(seen) == 15 * len(CONTENTS)
    assert os.listdir(tmp_path) == ["page.html"]


def test_what_a_killed_writer_left_is_removed_and_a_living_one_is_waited_for(tmp_path):
    path, beside = tmp_path / "a.json", tmp_path / ".a.json.new"
    beside.write_bytes(b"half")
    write_whole(path, b"1")
    assert path.read_bytes() == b"1" and not beside.exists()
    with beside.open("xb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        other = threading.Thread(target=write_whole, args=(path, b"2"), daemon=True)
        other.start()
        other.join(0.2)
        assert other.is_alive() and path.read_bytes() == b"1" and beside.exists()
        os.replace(beside, path)
    other.join(10)
    assert path.read_bytes() == b"2" and os.listdir(tmp_path) == ["a.json"]


def test_where_a_folder_lies_in_its_way_the_file_stays_as_it_was(tmp_path):
    path = tmp_path / "a.json"
    write_whole(path, b"1")
    (tmp_path / ".a.json.new").mkdir()
    with pytest.raises(ConfigError, match=r"a\.json"):
        write_whole(path, b"2")
    assert path.read_bytes() == b"1"
