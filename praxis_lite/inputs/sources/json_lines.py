"""A source over JSON lines files, which may be compressed."""

import dataclasses
import gzip
import io
import json
import zlib
from collections.abc import Iterator

from praxis_lite.core.errors import ConfigError, format_bytes, shortened
from praxis_lite.host.file_reading import MAX_NESTING, has_extension, is_nested, unique_keys
from praxis_lite.host.optional_packages import optional_module
from praxis_lite.inputs.sources.base import Example
from praxis_lite.inputs.sources.copied import FileSource
from praxis_lite.inputs.sources.faults import BadExample
from praxis_lite.inputs.sources.files.texts import decode_utf8

# Extensions of compressed files, and the bytes with which such files begin.
COMPRESSED = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd"}
# Exceptions from reading a truncated or damaged compressed file; zstd raises OSError.
_DAMAGED = (EOFError, OSError, zlib.error)
_LONGEST = 1 << 26  # Maximum number of bytes in a line.


@dataclasses.dataclass(eq=False)
class JsonLines(FileSource):
    """A source over JSON lines files with one example per line, optionally compressed (.gz, .zst).

    Blank lines are ignored. The cached copy stores the unparsed lines, and a line is parsed when
    its example is read. Objects may therefore differ in their keys and types, unlike rows in Arrow
    tables.
    """

    def records(self, path: str) -> Iterator[tuple[int, bytes]]:
        number = 0
        with _opened(path) as lines:
            try:
                while line := lines.readline(_LONGEST + 1):
                    number += 1
                    if len(line) > _LONGEST:
                        raise ConfigError(
                            f"{path}:{number} is longer than {format_bytes(_LONGEST)}; expected an "
                            "object per line. Split the document, or exclude the file from `files`."
                        )
                    if not line.isspace():
                        yield number, line
            except _DAMAGED as error:
                if not has_extension(path, *COMPRESSED):
                    raise
                raise BadExample(
                    "truncated",
                    path,
                    f"is truncated or damaged: it cannot be read after line {number:,} ({error})",
                    "Write or copy the file again.",
                ) from None

    def example(self, record: bytes, where: str) -> Example:
        return parsed(record, where)

    def where(self, index: int) -> str:
        file, _ = self.file_and_row(index)
        return f"{self.paths[file]}:{self._columns['row'][index].as_py()}"


def _opened(path: str) -> io.BufferedIOBase:
    """Opens a file for reading lines, and decompresses it if its name ends in .gz or .zst."""
    if has_extension(path, ".gz"):
        return gzip.open(path, "rb")
    if has_extension(path, ".zst"):
        # Use a small buffer, since its contents are lost if the file is damaged.
        return io.BufferedReader(
            optional_module("pyarrow", path).input_stream(path, compression="zstd"), 1 << 13
        )
    return open(path, "rb")


def parsed(line: bytes, where: str) -> Example:
    """Parses a JSON line that contains an object.

    Args:
      line: UTF-8 bytes of the line.
      where: Location of the line for error messages: "file:line".

    Raises:
      BadExample: The line is not UTF-8, not JSON, or not an object, or repeats a key.
    """
    for end, start in COMPRESSED.items():
        if line.startswith(start):
            raise BadExample(
                "not_utf8",
                where,
                "is not UTF-8: it starts like a compressed file",
                f"If the file is compressed, its name must end in {end}.",
            )
    text = decode_utf8(line, where)  # Removes a byte order mark, as RFC 8259 permits.
    try:
        value = json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise BadExample(
            "not_json", where, f"is not valid JSON: {error}", "Fix the line."
        ) from None
    if text.count("[") + text.count("{") > MAX_NESTING and is_nested(value, MAX_NESTING):
        raise BadExample(
            "not_json", where, f"is nested more than {MAX_NESTING} levels deep", "Fix the line."
        )
    if not isinstance(value, dict):
        raise BadExample(
            "not_json",
            where,
            f"is {shortened(text.strip())}; expected an object",
            'Use objects such as {"text": ...}.',
        )
    return value
