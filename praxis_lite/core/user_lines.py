"""The line of the user's own code that an exception comes from."""

import os
import re
import sysconfig
import traceback
from pathlib import Path

__all__ = ("LIBRARY_FOLDERS",)

_PACKAGE = Path(__file__).parents[1]
# Where the library's own files are; experiments in a checkout belong to its owner.
LIBRARY_FOLDERS = tuple(
    f"{folder}{os.sep}"
    for folder in (_PACKAGE, _PACKAGE.parent / "praxis_tools", _PACKAGE.parent / "tasks")
)
# The library, the program next to it in its checkout, and Python.
_NOT_OF_THE_USER = (
    *LIBRARY_FOLDERS, f"{_PACKAGE.parent / 'main.py'}",
    *(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib")),
)
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")


def user_line(error: BaseException) -> traceback.FrameSummary | None:
    """Returns the innermost line of the user's own code that raised an exception, or None."""
    if isinstance(error, SyntaxError) and error.filename and _is_users(error.filename):
        text = (error.text or "").strip()
        return traceback.FrameSummary(error.filename, error.lineno, "<module>", line=text)
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame for frame in reversed(frames) if _is_users(frame.filename)), None)


def _is_users(file: str) -> bool:
    is_installed = file.startswith("<") or _INSTALLED.search(file)
    return not is_installed and not os.path.abspath(file).startswith(_NOT_OF_THE_USER)
