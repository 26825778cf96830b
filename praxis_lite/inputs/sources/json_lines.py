"""Files of JSON lines, plain or compressed."""

import contextlib
import dataclasses
import functools
import gzip
import io
import json
import zlib
from array import array
from collections.abc import Callable, Iterator
from typing import IO, Any

import numpy as np

from praxis_lite.core.errors import ConfigError, format_bytes, shown
from praxis_lite.files.json_text import MOST_NESTED, is_nested
from praxis_lite.host.optional_packages import optional_module
from praxis_lite.inputs.sources.base import Example, FileSource
from praxis_lite.inputs.sources.faults import BadExample
from praxis_lite.inputs.sources.file_index import FileIndex, Made
from praxis_lite.inputs.sources.files.texts import decoded
from praxis_lite.inputs.sources.record_files import (
    PlainFile,
    RecordCopy,
    RecordFile,
    RecordWriter,
    copy_of,
    writing_copy,
)

# How compressed files end and begin.
COMPRESSED = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd"}
# What reading raises where a compressed file is cut off or damaged; zstd's is an OSError.
DAMAGED = (EOFError, OSError, zlib.error)

# Bytes of a line: a small file may unpack to one that fills all memory.
_LONGEST = 1 << 26


@dataclasses.dataclass(eq=False)
class JsonLines(FileSource):
    """The objects of JSON lines, in plain files, .gz or .zst; blank lines are left out.

    A compressed file cannot be read from its middle: its lines are copied once, in small compressed
    groups, into an ArrayRecord file beside the index.
    """

    def index_file(self, path: str) -> Made:
        starts, numbers, values = array("q"), array("q"), {}
        place = number = 0
        with opened_lines(path) as lines, self._copying(path) as copy:
            try:
                read = functools.partial(lines.readline, _LONGEST + 1)
                for number, line in enumerate(iter(read, b""), 1):
                    if len(line) > _LONGEST:
                        raise ConfigError(
                            f"{path}:{number} is longer than {format_bytes(_LONGEST)}; wanted is "
                            "an object per line. Cut the document, or leave the file out of files."
                        )
                    if not line.isspace():
                        starts.append(place)
                        numbers.append(number)
                        copy(line)
                    place += len(line)
            except DAMAGED as error:
                values["truncated"] = f"after line {number:,} it cannot be read ({error})"
        arrays = {}
        if not _is_compressed(path):
            arrays["starts"] = np.array([*starts, place], np.int64)
        if number != len(numbers):  # There are blank lines.
            arrays["numbers"] = np.array(numbers, np.int64)
        return {"num_examples": len(numbers), **values}, arrays

    @contextlib.contextmanager
    def _copying(self, path: str) -> Iterator[Callable[[bytes], Any]]:
        if not _is_compressed(path):
            yield lambda line: None
            return
        with (
            writing_copy(self.cache_folder(), path, "array_record") as copy,
            RecordWriter(copy) as writer,
        ):
            yield writer.write

    def open_file(self, index: FileIndex) -> RecordFile | PlainFile:
        if _is_compressed(index.path):
            return RecordCopy(copy_of(self.cache_folder(), index, self.index_file), index.path)
        return PlainFile(index.path)

    def example(self, index: FileIndex, row: int) -> Example:
        file = self.opened(index)
        if isinstance(file, RecordFile):
            line = file[row]
        else:
            start, stop = index.arrays["starts"][row : row + 2].tolist()
            line = file.read(start, stop)
        return parsed(line, self._where(index, row))

    def where(self, index: int) -> str:
        return self._where(*self.place_of(index))

    def _where(self, index: FileIndex, row: int) -> str:
        numbers = index.arrays.get("numbers")
        return f"{index.path}:{row + 1 if numbers is None else numbers[row]}"


def opened_lines(path: str) -> IO[bytes]:
    """Returns the lines of a file, decompressed if its name ends in .gz or .zst."""
    if path.endswith(".gz"):
        return gzip.open(path, "rb")
    if path.endswith(".zst"):
        pyarrow = optional_module("pyarrow", path)
        # A size of its own, for Python's differs by version: where the file is damaged, what is in
        # the buffer is lost.
        return io.BufferedReader(pyarrow.input_stream(path, compression="zstd"), 1 << 13)
    return open(path, "rb")


def parsed(line: bytes, where: str) -> Example:
    """Returns the object of a line of JSON.

    Raises:
      BadExample: it is not UTF-8, no JSON, or no object; names `where`, "file:line".
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
    if text.count("[") + text.count("{") > MOST_NESTED and is_nested(result, MOST_NESTED):
        raise BadExample(
            "not_json", where, f"is nested more than {MOST_NESTED} deep", "Mend the line."
        )
    if not isinstance(result, dict):
        raise BadExample(
            "not_json", where, f"is {shown(text.strip())}; wanted is an object",
            'Write {"text": ...}, say.',
        )
    return result


def _is_compressed(path: str) -> bool:
    return path.endswith(tuple(COMPRESSED))
