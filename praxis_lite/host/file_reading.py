"""Plain files: opened without waiting, JSON with a single reading, lines of a file that grows."""

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from praxis_lite.core.errors import ConfigError

__all__ = (
    "content_of", "descriptor", "lines_of", "opened", "opened_to_append", "parse_json", "read_json",
)

# Deeper nesting would exceed the recursion limit of code that walks through the value. The limit of
# Python's parser changes with its version.
MOST_NESTED = 200
_BLOCK = 1 << 16  # Bytes that are read at once from the end of a file.


def parse_json(text: str) -> Any:
    """Returns the value of the text.

    Raises:
        ValueError: it is not JSON, has a key twice, NaN, an infinity, a number too large for
            64 bits, or brackets too deep; `str()` of it is the reason.
    """
    try:
        return json.loads(
            text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_float
        )
    except RecursionError:
        raise ValueError("brackets within brackets, too deep") from None


def is_nested(value: Any, most: int) -> bool:
    """Returns True if lists and objects are nested more than `most` deep."""
    level = [value]
    for _ in range(most):
        level = [
            inner for item in level if isinstance(item, dict | list)
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
    return any(isinstance(element, dict | list) for element in level)


def opened(path: str | os.PathLike[str]) -> IO[bytes]:
    """Opens a plain file to read. Raises OSError for all else: a pipe would be waited for."""
    return os.fdopen(descriptor(path, os.O_RDONLY), "rb")


def content_of(path: str | os.PathLike[str]) -> bytes:
    """Returns the bytes of a plain file; raises OSError as `opened`."""
    with opened(path) as file:
        return file.read()


def lines_of(path: Path, newest: int | None = None) -> list[str]:
    """Returns the lines of a file that a job adds to while it trains; [] if there is no such file.

    Args:
      newest: Only the lines in so many bytes at its end, the first of which may be cut; None: all.

    Raises:
      ConfigError: it cannot be read.
    """
    try:
        with opened(path) as file:
            if newest is not None:
                file.seek(max(0, os.fstat(file.fileno()).st_size - newest))
            content = file.read()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror or error}). A job that trains writes it: "
            "remove what is in its place."
        ) from None
    return [text for text in content.decode("utf-8", "replace").split("\n") if text]


def lines_from_end(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yields (offset, text) of each line of a file, the last line first, without line breaks.

    The first one is what follows the last line break: b"", unless a writer was cut short. Only the
    lines that are asked for are read.
    """
    end, rest = os.fstat(file.fileno()).st_size, []
    while end:
        start = max(0, end - _BLOCK)
        first, *others = os.pread(file.fileno(), end - start, start).split(b"\n")
        for text in reversed(others):
            end -= len(text)
            yield end, b"".join([text, *reversed(rest)])
            rest, end = [], end - 1
        rest.append(first)  # It may begin in the block before.
        end = start
    yield 0, b"".join(reversed(rest))


def finish_last_line(file: IO[bytes]) -> None:
    """Adds the line break that the last line of a file lacks; a line that is cut short is removed.

    Args:
      file: opened to read and to write.
    """
    end = None
    for offset, text in lines_from_end(file):
        end = offset if end is None else end
        if text and not is_json(text):
            os.ftruncate(file.fileno(), offset)
        elif text and offset == end:
            os.pwrite(file.fileno(), b"\n", offset + len(text))
        if text:
            return


def is_json(text: bytes) -> bool:
    """Returns True if Python's parser takes the text."""
    try:
        json.loads(text.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return False
    return True


def opened_to_append(path: str | os.PathLike[str]) -> IO[str]:
    """Opens a plain file to add text to it, new or old; raises OSError as `opened` does."""
    number = descriptor(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    return os.fdopen(number, "a", encoding="utf-8")


def descriptor(path: str | os.PathLike[str], flags: int) -> int:
    """Returns the descriptor of a plain file, opened; raises OSError as `opened` does."""
    number = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(f"{os.path.basename(path)} is no plain file")
    return number


def read_json(path: Path) -> Any:
    """Returns the value in a file.

    Raises:
        ConfigError: it cannot be read, or is not JSON.
    """
    wanted = "Restore the file or start a new job."
    try:
        return parse_json(content_of(path).decode())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror or error}). {wanted}") from None
    except ValueError as error:
        raise ConfigError(
            f"{path} is damaged, or praxis_lite did not write it ({error}). {wanted}"
        ) from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key[:80]!r} stands twice in one object")
        result[key] = value
    return result


def _constant(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")


def _float(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{text[:80]} is too large for 64 bits")
    return value
