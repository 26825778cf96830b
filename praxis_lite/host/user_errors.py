"""Messages for exceptions of the user's code: the line, and the file with the traceback."""

import contextlib
import re
import tempfile
import traceback
from pathlib import Path
from typing import NamedTuple

from praxis_lite.core.errors import ConfigError, shown
from praxis_lite.core.user_lines import user_line
from praxis_lite.host.whole_files import write_whole


class ElsewhereError(RuntimeError):
    """An exception of another process, whose traceback is the message.

    Attributes:
        in_short: The result of `described` for it there.
    """

    def __init__(self, message: str, in_short: str | None):
        super().__init__(message)
        self.in_short = in_short


class Explained(NamedTuple):
    """A message for an exception, and the exit status: 1 for the user's code."""

    words: str
    status: int


def own_words(error: BaseException) -> str:
    """Returns an exception's first paragraph, without what Fiddle appends to it."""
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return " ".join(text.strip().split("\n\n")[0].split("\nThe error occurred while")[0].split())


def explained(error: BaseException, path: Path | None) -> Explained | None:
    """Returns a message for an exception of the user's code or of a file, or None.

    None if only the traceback explains it, or if the traceback cannot be written.

    Args:
        path: The file for the traceback. None, or if it cannot be written: a new temporary file.
    """
    words, status = described(error), 1
    if words is None:
        if not isinstance(error, OSError) or error.filename is None:
            return None
        words, status = f"{error.filename}: {error.strerror}.", 2
    text = "".join(traceback.format_exception(error)).encode("utf-8", "backslashreplace")
    if path is not None:
        with contextlib.suppress(ConfigError):  # The job's directory was deleted, or is full.
            write_whole(path, text)
            return Explained(f"{words} The whole traceback is in {path}.", status)
    try:
        number, name = tempfile.mkstemp(prefix="praxis_lite_traceback_", suffix=".txt")
        with open(number, "wb") as file:
            file.write(text)
    except OSError:
        return None
    return Explained(f"{words} The whole traceback is in {name}.", status)


def described(error: BaseException) -> str | None:
    """Returns 'model.py, line 12, in __call__: `x @ w`: TypeError: ...', or None.

    None if no line of the user's code raised the exception.
    """
    if isinstance(error, ElsewhereError):
        return error.in_short
    line = user_line(error)
    if line is None:
        return None
    file = line.filename
    with contextlib.suppress(ValueError):
        file = str(Path(file).relative_to(Path.cwd()))
    where = f"{file}, line {line.lineno}"
    if line.name != "<module>":
        where += f", in {line.name}"
    code = f": `{shown(line.line, 200)}`" if line.line else ""
    words = shown(own_words(error), 1000).rstrip(".")
    message = f"{where}{code}: {type(error).__name__}: {words}".rstrip(": ") + "."
    if isinstance(error, AttributeError) and re.search(r"split_dims_mapping\.\w", line.line or ""):
        # As Pax's users write it.
        message += " A split-dims mapping has no fields here: assign the sequence itself."
    return message
