"""The page of public names, made from the code.

python -m tests.support.api_page --write    # docs/api.md
"""

import ast
import functools
import importlib.util
import inspect
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from praxis_lite.public_names import PACKAGES, homes_of

ROOT = Path(__file__).parents[2]
_MEMBERS = types.FunctionType | classmethod | property | functools.cached_property
PAGE = ROOT / "docs/api.md"
COMMANDS = (
    "praxis_lite.main",
    "praxis_lite.checkpoints",
    "praxis_lite.inputs",
    "praxis_lite.inputs.tokenizers",
    "praxis_lite.huggingface",
    "praxis_tools.lm_eval",
    "praxis_lite.pax.job",
    "praxis_tools.export",
)
HEAD = """\
# Public names

Made from the code by `python -m tests.support.api_page --write`; a test says when it is
out of date.

You may import the names on this page, each from the package that it is listed under. Nothing is
released yet: until then names may change, and CHANGELOG.md says how. All else may move at any time,
files and folders too. The names are typed (`py.typed`): editors and type
checkers see where each is defined.

A class that you may subclass is followed by its methods; [how_to_add.md](how_to_add.md) has
examples. A parameter with `=...` has a default that is no plain value. A `config.json` and `--set`
may name the classes here and the functions that compute, but not what reads files, starts devices
or changes what is global.
"""

TOOLS_HEAD = """\
## Names for tools

For programs about jobs, such as praxis_tools, which imports nothing else of praxis_lite: the names
in `__all__` of these modules.
"""


def names_for_tools() -> dict[str, tuple[str, ...]]:
    """Returns the names in `__all__` of each module of praxis_lite that is not listed above."""
    names = {}
    for path in sorted((ROOT / "praxis_lite").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            is_literal = isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
            if module not in PACKAGES and is_literal and ast.unparse(node.targets[0]) == "__all__":
                names[module] = ast.literal_eval(node.value)
    return names


def page() -> str:
    """Returns docs/api.md as it should be."""
    lines = [HEAD]
    for package in PACKAGES:
        lines += [f"## {package}", "", f"{first_line(importlib.import_module(package))}", ""]
        for name, value in public_values(package):
            lines.append(f"- `{name}{signature(value)}`: {said_of(package, name, value)}")
            lines += [f"  - `{shown}`: {first_line(member)}" for shown, member in methods_of(value)]
        lines.append("")
    lines += [TOOLS_HEAD]
    for module, names in sorted(names_for_tools().items()):
        lines.append(f"- `{module}`: {', '.join(f'`{name}`' for name in names)}")
    lines += ["", "## Commands", ""]
    for module in COMMANDS:
        lines.append(f"- `python -m {module}`: {first_line(importlib.import_module(module))}")
    return "\n".join(lines) + "\n"


def methods_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields (name with arguments, member) of the methods of a class that users subclass."""
    is_base = isinstance(value, type) and (
        inspect.isabstract(value) or "ubclass" in (value.__doc__ or "")
    )
    for name, member in vars(value).items() if is_base else ():
        is_public = not name.startswith("_") and isinstance(member, _MEMBERS)
        if is_public and getattr(member, "__doc__", None):
            arguments = signature(member).replace("(self, ", "(").replace("(self)", "()")
            yield f"{name}{arguments}", member


def public_values(package: str) -> Iterator[tuple[str, Any]]:
    """Yields (name, value) of a package's public names, in the order of the alphabet."""
    for name in sorted(homes_of(package), key=str.lower):
        yield name, getattr(importlib.import_module(package), name)


def signature(value: Any) -> str:
    """Returns the signature of a function or class without its types; of others nothing."""
    signature = _signature(value)
    if signature is None:
        return ""
    plain = [
        parameter.replace(annotation=parameter.empty, default=_shown(parameter.default))
        for parameter in signature.parameters.values()
    ]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))


def said_of(package: str, name: str, value: Any) -> str:
    """Returns the first line of a docstring, or for a constant the comment above it."""
    if isinstance(value, type | types.FunctionType | types.ModuleType) or hasattr(
        value, "__wrapped__"
    ):
        return first_line(value)
    home = importlib.util.find_spec(homes_of(package)[name]).origin
    lines = Path(home).read_text().splitlines()
    at = next(
        node.lineno - 1
        for node in ast.parse("\n".join(lines)).body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and name in ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
    )
    above = lines[:at]
    comment: list[str] = []
    while above and above[-1].startswith("#"):
        comment.insert(0, above.pop().removeprefix("#").strip())
    assert comment, f"{package}.{name} needs a comment above it"
    return " ".join(comment)


def first_line(value: Any) -> str:
    """Returns the first line of an object's own docstring."""
    return inspect.cleandoc(value.__doc__).split("\n")[0]


def _signature(value: Any) -> inspect.Signature | None:
    if not isinstance(value, type | types.FunctionType | types.MethodType | functools.partial):
        return None
    try:
        return inspect.signature(value)
    except ValueError:
        return None


def _shown(default: Any) -> Any:
    plain = default is None or isinstance(default, bool | int | float | str | tuple)
    return default if plain or default is inspect.Parameter.empty else _Dots()


class _Dots:
    def __repr__(self) -> str:
        return "..."


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page())
