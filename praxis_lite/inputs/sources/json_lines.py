"""Files of JSON lines, plain or compressed."""

import dataclasses
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from typing import IO

from praxis_lite.core.errors import ConfigError, format_bytes, shown
from praxis_lite.host.file_reading import MAX_NESTING, is_nested
from praxis_lite.host.optional_packages import optional_module
from praxis_lite.inputs.sources.base import Example
from praxis_lite.inputs.sources.copied import FileSource
from praxis_lite.inputs.sources.faults import BadExample
from praxis_lite.inputs.sources.files.texts import decoded

# How compressed files end and begin.
COMPRESSED = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd"}
# What reading raises where a compressed file is cut off or damaged; zstd's is an OSError.
_DAMAGED = (EOFError, OSError, zlib.error)
_LONGEST = 1 << 26  # Bytes of a line.


@dataclasses.dataclass(eq=False)
class JsonLines(FileSource):
    """The objects of JSON lines, in plain files, .gz or .zst; blank lines are left out.

    The copy has the lines as they are, and a line is parsed when its example is asked for. So
    objects may differ in their keys and types, which columns of Arrow could not represent.
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
                            "object per line. Cut the document, or leave the file out of files."
                        )
                    if not line.isspace():
                        yield number, line
            except _DAMAGED as error:
                if not path.endswith(tuple(COMPRESSED)):
                    raise
                raise BadExample(
                    "truncated", path,
                    f"is cut off or damaged: after line {number:,} it cannot be read ({error})",
                    "Make or copy the file again.",
                ) from None

    def example(self, record: bytes, where: str) -> Example:
        return parsed(record, where)

    def where(self, index: int) -> str:
        file, _ = self.place_of(index)
        return f"{self.paths[file]}:{self._columns['row'][index].as_py()}"


def _opened(path: str) -> IO[bytes]:
    """Returns the lines of a file, decompressed if its name ends in .gz or .zst."""
    if path.endswith(".gz"):
        return gzip.open(path, "rb")
    if path.endswith(".zst"):
        # With a small buffer: where the file is damaged, what is in the buffer is lost.
        return io.BufferedReader(
            optional_module("pyarrow", path).input_stream(path, compression="zstd"), 1 << 13
        )
    return open(path, "rb")


def parsed(line: bytes, where: str) -> Example:
    """Returns the object of a line of JSON.

    Raises:
      BadExample: it is not UTF-8, not JSON, or not an object; names `where`, "file:line".
    """
    for end, start in COMPRESSED.items():
        if line.startswith(start):
            raise BadExample(
                "not_utf8", where, "is not UTF-8: it begins as a compressed file does",
                f"It is compressed: let its name end in {end}.",
            )
    # A byte order mark before a line RFC 8259 lets a reader ignore.
    text = decoded(line, where)
    try:
        result = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadExample("not_json", where, f"is no JSON: {error}", "Mend the line.") from None
    if text.count("[") + text.count("{") > MAX_NESTING and is_nested(result, MAX_NESTING):
        raise BadExample(
            "not_json", where, f"is nested more than {MAX_NESTING} deep", "Mend the line."
        )
    if not isinstance(result, dict):
        raise BadExample(
            "not_json", where, f"is {shown(text.strip())}; expected an object",
            'Write {"text": ...}, say.',
        )
    return result
