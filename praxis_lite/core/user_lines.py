"""Finds the line of user code that raised an exception."""

import os
import re
import sysconfig
import traceback
from pathlib import Path

__all__ = ("LIBRARY_FOLDERS",)

_PACKAGE = Path(__file__).parents[1]
# Folders of the library. The folder experiments/ in a checkout is not included, because it contains
# user code.
LIBRARY_FOLDERS = tuple(
    f"{folder}{os.sep}"
    for folder in (_PACKAGE, _PACKAGE.parent / "praxis_tools", _PACKAGE.parent / "tasks")
)
# The library, the `main.py` next to it in a checkout, and Python's standard library.
_NOT_USER_CODE = (
    *LIBRARY_FOLDERS,
    f"{_PACKAGE.parent / 'main.py'}",
    *(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib")),
)
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")


def user_line(error: BaseException) -> traceback.FrameSummary | None:
    """Returns the innermost frame of user code in an exception's traceback, or None."""
    if isinstance(error, SyntaxError) and error.filename and _is_user_code(error.filename):
        text = (error.text or "").strip()
        return traceback.FrameSummary(error.filename, error.lineno, "<module>", line=text)
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame for frame in reversed(frames) if _is_user_code(frame.filename)), None)


def _is_user_code(file: str) -> bool:
    is_installed = file.startswith("<") or _INSTALLED.search(file)
    is_command = os.path.basename(file) == "praxis"  # The script bin/praxis, which pip creates.
    return not (is_installed or is_command) and not os.path.abspath(file).startswith(_NOT_USER_CODE)
