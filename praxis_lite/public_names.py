"""Public names, loaded on first use: `__init__.pyi` says where each is defined, and nothing else.

    __getattr__, __dir__, __all__ = public_names(__name__, __file__)

So `from praxis_lite.layers import Linear` imports one file and not a hundred, and `import
praxis_lite` does not import jax. Type checkers and editors read the same stub.
"""

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from praxis_lite import former_names


def public_names(
    package: str, file: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns a package's `__getattr__`, `__dir__` and `__all__`.

    Args:
      package: its `__name__`.
      file: its `__file__`, beside which lies the stub, `__init__.pyi`. Each of its lines is
        `from MODULE import NAME as NAME`.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    homes = {
        alias.name: node.module
        for node in stub.body if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    def load(name: str) -> Any:
        if (package, name) in former_names.NAMES:
            home = former_names.NAMES[package, name]
            former_names.warn(f"{package}.{name}", f"{home}.{name}")
            vars(sys.modules[package])[name] = getattr(importlib.import_module(home), name)
            return vars(sys.modules[package])[name]
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if homes[name] == package:
            return importlib.import_module(f"{package}.{name}")
        return getattr(importlib.import_module(homes[name]), name)

    return load, lambda: sorted(homes), sorted(homes)
