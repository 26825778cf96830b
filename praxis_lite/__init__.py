"""praxis_lite: models written for a single device, run on any mesh.

The names below are imported on first use, so that `import praxis_lite`, and the error for a
mistyped command, do not import jax.
"""

import sys
from importlib.machinery import PathFinder
from pathlib import Path

from praxis_lite.public_names import public_names

if sys.platform == "win32":
    raise ImportError(
        "praxis_lite does not run on Windows, because it locks and memory-maps files as on Linux. "
        "Install it in WSL2, the Windows Subsystem for Linux: run `wsl --install`, and then pip in "
        "its terminal."
    )

__version__ = "1.0.0rc1"

__getattr__, __dir__, __all__ = public_names(__name__)


class _TopFolders(PathFinder):
    """Imports praxis_lite.tasks and praxis_lite.experiments from the top folder of a checkout.

    `setup.py` installs them inside the package. The bare names `tasks` and `experiments` refer to
    user packages elsewhere on sys.path.
    """

    checkout = Path(__file__).resolve().parents[1]

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        package, _, folder = name.rpartition(".")
        if folder in ("tasks", "experiments") and package in ("praxis_lite", ""):
            others = [entry for entry in sys.path if Path(entry).resolve() != cls.checkout]
            return super().find_spec(name, [str(cls.checkout)] if package else others)


if not Path(__file__).with_name("tasks").exists():
    sys.meta_path.insert(0, _TopFolders)
