"""Opens, reads and appends to regular files; rejects pipes, which may block."""

import io
import json
import os
import stat
from collections.abc import Iterator
from typing import IO, Any

from praxis_lite.core.errors import ConfigError
from praxis_lite.host.object_stores import AnyPath, StorePath

__all__ = (
    "append_text",
    "content_of",
    "descriptor",
    "lines_of",
    "opened",
    "opened_to_append",
    "parse_json",
    "read_json",
    "unique_keys",
)

# Deeper nesting would exceed the recursion limit in code that traverses the value. The limit of
# Python's own parser depends on the Python version.
MAX_NESTING = 200
_BLOCK_BYTES = 1 << 16  # Bytes per read from the end of a file.


def parse_json(text: str) -> Any:
    """Parses strict JSON.

    Raises:
      ValueError: The text is not JSON, is nested too deeply, or contains a duplicate key, NaN, an
        infinity, or a number too large for 64 bits. The message states the reason.
    """
    try:
        return json.loads(
            text, object_pairs_hook=unique_keys, parse_constant=_constant, parse_float=_float
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def is_nested(value: Any, max_depth: int) -> bool:
    """Returns whether lists and objects are nested more than `max_depth` levels deep."""
    level = [value]
    for _ in range(max_depth):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return any(isinstance(inner, dict | list) for inner in level)


def has_extension(path: str | os.PathLike[str], *extensions: str) -> bool:
    """Returns whether a name ends with an extension, such as ".jsonl", in any case."""
    return os.fspath(path).lower().endswith(extensions)


def opened(path: str | os.PathLike[str]) -> IO[bytes]:
    """Opens a regular file for reading. Raises OSError for pipes, which could block."""
    return os.fdopen(descriptor(path, os.O_RDONLY), "rb")


def content_of(path: str | os.PathLike[str] | StorePath) -> bytes:
    """Returns the content of a regular file or an object.

    Raises:
      OSError: The file does not exist, or see `opened`.
      ConfigError: The object store cannot be read.
    """
    if isinstance(path, StorePath):
        return path.read_bytes()
    with opened(path) as file:
        return file.read()


def lines_of(path: AnyPath, num_bytes: int | None = None) -> list[str]:
    """Returns the lines of a file to which a job appends, or [] if the file does not exist.

    Args:
      path: The file.
      num_bytes: Number of bytes to read from the end of a local file, or None for the complete
        file. The first line may be incomplete.

    Raises:
      ConfigError: The file cannot be read.
    """
    try:
        with io.BytesIO(path.read_bytes()) if isinstance(path, StorePath) else opened(path) as file:
            if num_bytes is not None:
                file.seek(max(0, os.fstat(file.fileno()).st_size - num_bytes))
            content = file.read()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror or error}); expected a file written by a "
            "training job. Remove it or make it readable."
        ) from None
    return [text for text in content.decode("utf-8", "replace").split("\n") if text]


def lines_from_end(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yields (offset, text) for each line of a file in reverse order, without line breaks.

    The first result is the text after the last line break, which is b"" or an incomplete line. The
    file is read only as far as needed.
    """
    # Read blocks from the end. The text before offset `end` has not been searched yet. `partial`
    # contains the parts, last part first, of a line whose start has not been found.
    end, partial = os.fstat(file.fileno()).st_size, list[bytes]()
    while end:
        start = max(0, end - _BLOCK_BYTES)
        first, *others = os.pread(file.fileno(), end - start, start).split(b"\n")
        for text in reversed(others):
            end -= len(text)
            yield end, b"".join([text, *reversed(partial)])
            partial, end = [], end - 1
        partial.append(first)  # The line may start in an earlier block.
        end = start
    yield 0, b"".join(reversed(partial))


def finish_last_line(file: IO[bytes]) -> None:
    """Removes an incomplete last line, or adds its missing line break.

    Args:
      file: The file, opened for reading and writing.
    """
    end = None
    for offset, text in lines_from_end(file):
        # `end` is the offset after the last line break. If the text there is JSON, it is a complete
        # line without a line break.
        end = offset if end is None else end
        if text and not is_json(text):
            os.ftruncate(file.fileno(), offset)
        elif text and offset == end:
            os.pwrite(file.fileno(), b"\n", offset + len(text))
        if text:
            return


def is_json(text: bytes) -> bool:
    """Returns whether Python's parser accepts the text."""
    try:
        json.loads(text.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return False
    return True


def append_text(path: AnyPath, text: str) -> None:
    """Appends text to a file or an object, and creates it if needed.

    In an object store, the text must be unique; see `StorePath.append_bytes`.

    Raises:
      OSError: The file cannot be written.
      ConfigError: The object cannot be written.
    """
    if isinstance(path, StorePath):
        path.append_bytes(text.encode())
    else:
        with opened_to_append(path) as file:
            file.write(text)


def opened_to_append(path: str | os.PathLike[str]) -> IO[str]:
    """Opens a regular file for appending text, and creates it if needed."""
    fd = descriptor(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    return os.fdopen(fd, "a", encoding="utf-8")


def descriptor(path: str | os.PathLike[str], flags: int) -> int:
    """Opens a regular file and returns its descriptor. Raises OSError for any other file type."""
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(f"{os.path.basename(path)} is not a regular file")
    return fd


def read_json(path: AnyPath) -> Any:
    """Reads a strict JSON file.

    Raises:
      ConfigError: The file cannot be read, or is not JSON.
    """
    advice = "Restore the file or start a new job."
    try:
        return parse_json(content_of(path).decode())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror or error}). {advice}") from None
    except ValueError as error:
        raise ConfigError(
            f"{path} is damaged or was not written by praxis_lite ({error}). {advice}"
        ) from None


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns an object, for `object_pairs_hook` of json. Raises ValueError if a key repeats."""
    by_key: dict[str, Any] = {}
    for key, value in pairs:
        if key in by_key:
            raise ValueError(f"the key {key[:80]!r} occurs twice in an object")
        by_key[key] = value
    return by_key


def _constant(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


def _float(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{text[:80]} is out of range for a 64-bit float")
    return value
