"""A pipe in the place of a file of a job: nobody waits for its other end."""

import contextlib
import os
import threading

import pytest

from praxis_lite.host.file_reading import content_of, opened_to_append


@contextlib.contextmanager
def within_seconds(path, seconds=60):
    """Fails if the other end of the pipe at `path` has to be opened for the body to go on."""
    ends = []
    timer = threading.Timer(seconds, lambda: ends.append(os.open(path, os.O_RDWR | os.O_NONBLOCK)))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        for end in ends:
            os.close(end)
    assert not ends


@pytest.mark.parametrize("is_read", [False, True])
def test_only_a_plain_file_is_added_to(tmp_path, is_read):
    path = tmp_path / "log"
    for word in ("one ", "two"):
        with opened_to_append(path) as file:
            file.write(word)
    assert content_of(path) == b"one two"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK) if is_read else None
    with within_seconds(tmp_path / "pipe", 5), pytest.raises(OSError):
        opened_to_append(tmp_path / "pipe")
    if reader is not None:
        os.close(reader)
