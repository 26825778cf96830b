"""The lines of a JSON lines file as they are added, for a reader that comes behind its writer."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from praxis_lite.files.json_text import lines_from_end, opened
from praxis_lite.run.trainer.metrics.json_lines import with_non_finite

_STEP = re.compile(rb'\{"step": (\d+)[,}]')


class FollowedLines:
    """Reads a file of `JsonLinesWriter` from where it stopped before.

    A line that was not asked for costs a microsecond: it is not parsed.
    """

    def __init__(self, path: Path):
        self._path = path
        self._file: IO[bytes] | None = None

    def up_to(
        self, last: int, wants: Callable[[int], bool], after: int | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yields the lines of wanted steps, up to the first line of a step after `last`.

        NaN and the infinities are floats. Raises OSError if the file cannot be read.

        Args:
          after: of a file in the order of its steps: no line up to this step is wanted, and none
            is read when the file is opened.
        """
        if self._file is None:
            try:
                self._file = opened(self._path)
            except FileNotFoundError:
                return
            if after is not None:
                self._file.seek(_place_after(self._file, after))
        while True:
            start = self._file.tell()
            line = self._file.readline()
            match = _STEP.match(line)
            if not line.endswith(b"\n") or (match and int(match[1]) > last):
                self._file.seek(start)
                return
            if match and wants(int(match[1])):
                yield with_non_finite(json.loads(line))

    def restart(self) -> None:
        """Begins with the first line again, of a file that may have been replaced."""
        if self._file is not None:
            self._file.close()
        self._file = None


def _place_after(file: IO[bytes], step: int) -> int:
    """Returns where the lines of later steps begin, by reading them from the end."""
    place = 0
    for offset, text in lines_from_end(file):
        place = offset
        match = _STEP.match(text)
        if match and int(match[1]) <= step:
            return offset + len(text) + 1
    return place
