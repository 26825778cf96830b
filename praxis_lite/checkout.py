"""A checkout of the library: tasks/ and experiments/ lie at its top, where people look for them.

They are packages of praxis_lite, through links within it, and by no other name: a second copy of a
class would be another class. So at the top of a checkout, which may be on sys.path, the names
`tasks` and `experiments` mean packages of the user's own that lie elsewhere, or nothing. A wheel
has the folders themselves in place of the links, and what lies beside it is not its own.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from pathlib import Path

NAMES = ("tasks", "experiments")
_PACKAGE = Path(__file__).resolve().parent
# The top of the checkout, or None if the library is installed.
ROOT = _PACKAGE.parent if (_PACKAGE / NAMES[0]).is_symlink() else None


def install() -> None:
    """Lets `tasks` and `experiments` mean the user's own packages."""
    if ROOT is not None and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def refuse(name: str) -> None:
    """Raises ImportError if a package of the library is imported by its folder's name."""
    if name in NAMES:
        raise ImportError(  # No ModuleNotFoundError, which says that a name in a config is gone.
            f"praxis_lite's own {name} are praxis_lite.{name}: import them by that name. If you "
            "mean a package of your own, it is not on sys.path, or has no __init__.py.", name=name,
        )


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in NAMES:
            return None
        elsewhere = [entry for entry in sys.path if Path(entry).resolve() != ROOT]
        specs = [importlib.machinery.PathFinder.find_spec(fullname, elsewhere)]
        specs += [
            finder.find_spec(fullname, None) for finder in sys.meta_path
            if finder not in (self, importlib.machinery.PathFinder)
        ]
        for spec in specs:
            if spec is not None and spec.loader is not None:  # Else a folder without __init__.py.
                return spec
        refuse(fullname)
