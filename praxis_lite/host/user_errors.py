"""Explains exceptions in the user's code: the line that failed, and a file with the traceback."""

import contextlib
import re
import tempfile
import traceback
from pathlib import Path
from typing import NamedTuple

from praxis_lite.core.errors import ConfigError, shortened
from praxis_lite.core.user_lines import user_line
from praxis_lite.host.atomic_files import write_atomically


class RemoteError(RuntimeError):
    """An exception in another process, with the traceback from that process as the message.

    Attributes:
      description: Result of `describe_error` in that process.
    """

    def __init__(self, message: str, description: str | None):
        super().__init__(message)
        self.description = description


class ErrorReport(NamedTuple):
    """A message about an exception, and the exit status of the command.

    Attributes:
      message: The message, including the path of the file with the traceback.
      status: 1 for an exception in the user's code, 2 for an error about a file.
    """

    message: str
    status: int


def first_paragraph(error: BaseException) -> str:
    """Returns the first paragraph of an exception's message, without Fiddle's additions."""
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return " ".join(text.strip().split("\n\n")[0].split("\nThe error occurred while")[0].split())


def explain_error(error: BaseException, path: Path | None) -> ErrorReport | None:
    """Returns a message for an exception in the user's code or about a file.

    The traceback is written to a file whose path is part of the message.

    Args:
      error: The exception.
      path: The file for the traceback. If None, or if the file cannot be written, a temporary file
        is used.

    Returns:
      The message and exit status, or None for any other exception or if no file can be written.
    """
    message, status = describe_error(error), 1
    if message is None:
        if not isinstance(error, OSError) or error.filename is None:
            return None
        message, status = f"{error.filename}: {error.strerror}.", 2
    text = "".join(traceback.format_exception(error)).encode("utf-8", "backslashreplace")
    if path is not None:
        with contextlib.suppress(ConfigError):  # The disk may be full, or the directory deleted.
            write_atomically(path, text)
            return ErrorReport(f"{message} The full traceback is in {path}.", status)
    try:
        fd, name = tempfile.mkstemp(prefix="praxis_lite_traceback_", suffix=".txt")
        with open(fd, "wb") as file:
            file.write(text)
    except OSError:
        return None
    return ErrorReport(f"{message} The full traceback is in {name}.", status)


def describe_error(error: BaseException) -> str | None:
    """Returns a line such as 'model.py, line 12, in __call__: `x @ w`: TypeError: ...'.

    Returns None if the exception was not raised through a line of the user's code.
    """
    if isinstance(error, RemoteError):
        return error.description
    line = user_line(error)
    if line is None:
        return None
    file = line.filename
    with contextlib.suppress(ValueError):
        file = str(Path(file).relative_to(Path.cwd()))
    where = f"{file}, line {line.lineno}"
    if line.name != "<module>":
        where += f", in {line.name}"
    code = f": `{shortened(line.line, 200)}`" if line.line else ""
    text = shortened(first_paragraph(error), 1000).rstrip(".")
    message = f"{where}{code}: {type(error).__name__}: {text}".rstrip(": ") + "."
    if isinstance(error, AttributeError) and re.search(r"split_dims_mapping\.\w", line.line or ""):
        # Pax's syntax.
        message += " In praxis_lite a split-dims mapping has no fields: assign a sequence to it."
    return message
