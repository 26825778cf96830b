"""Prints the test files for changed source files, the closest first.

    python -m tests.support.tests_of praxis_lite/decode/beam_search.py ...

A test of a file is in the folder of tests/ with the same name (tests/tools/ for praxis_tools), but
several files may share a test file. This command therefore lists the test files that import the
file or one of its public names and, if there are none, those of the files that import the file. If
tests reach a file in no such way, as with modes, which jobs load by name, it prints the folder.
"""

import argparse
import ast
import functools
from collections.abc import Iterator
from pathlib import Path

from praxis_lite.public_names import PACKAGES, homes_of

ROOT = Path(__file__).parents[2]
FOLDERS = ("praxis_lite", "praxis_tools", "tasks", "experiments")
MAX_FILES = 8


def tests_of(source: str) -> list[str]:
    """Returns at most 8 test files of a source file, the closest first, or a folder of tests.

    Args:
      source: Path of a Python file, relative to the checkout.
    """
    if source.startswith("tests/"):
        return [source]
    found: dict[str, None] = {}
    modules = [module_of(Path(source))]
    seen = set(modules)
    while modules and not found:
        importing = {file for module in modules for file in importers()[module]}
        tests = sorted(file for file in importing if Path(file).name.startswith("test_"))
        found = dict.fromkeys(sorted(tests, key=lambda test: distance(source, test)))
        modules = [m for file in sorted(importing) if (m := module_of(Path(file))) not in seen]
        seen |= set(modules)
    return list(found)[:MAX_FILES] or [str(existing(mirrored_folder(source)))]


def distance(source: str, test: str) -> tuple[bool, int]:
    """Returns a sort key: tests named after the file, then those in similar folders."""
    folders, mirrored = mirrored_folder(source).parts, Path(test).parent.parts
    num_common = next(
        (n for n, (a, b) in enumerate(zip(folders, mirrored, strict=False)) if a != b),
        min(len(folders), len(mirrored)),
    )
    is_named_after = Path(test).stem == f"test_{Path(source).stem}"
    return not is_named_after, len(folders) + len(mirrored) - 2 * num_common


def mirrored_folder(source: str) -> Path:
    """Returns the folder of tests/ for a source file, which may not exist."""
    top, *folders = Path(source).parent.parts
    return Path("tests", *{"praxis_tools": ["tools"], "praxis_lite": []}.get(top, [top]), *folders)


def existing(folder: Path) -> Path:
    """Returns a folder of the checkout, or the closest folder above it that exists."""
    return next(path for path in (folder, *folder.parents) if (ROOT / path).is_dir())


def module_of(path: Path) -> str:
    """Returns the name by which a file of the checkout is imported."""
    name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    return f"praxis_lite.{name}" if path.parts[0] in ("tasks", "experiments") else name


@functools.cache
def importers() -> dict[str, set[str]]:
    """Returns the files that import each module, at any level."""
    found: dict[str, set[str]] = {}
    homes = {package: homes_of(package) for package in PACKAGES}
    paths = [path for folder in (*FOLDERS, "tests") for path in (ROOT / folder).rglob("*.py")]
    for path in paths:
        file = str(path.relative_to(ROOT))
        found.setdefault(module_of(Path(file)), set())
        for module in imported_modules(path, homes):
            found.setdefault(module, set()).add(file)
    return found


def imported_modules(path: Path, homes: dict[str, dict[str, str]]) -> Iterator[str]:
    """Yields the modules that a file imports; for public names, the modules that define them."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield homes.get(node.module, {}).get(alias.name, node.module)
                yield f"{node.module}.{alias.name}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", metavar="FILE")
    for file in parser.parse_args().files:
        path = Path(file).resolve().relative_to(ROOT)
        print("\n".join(tests_of(str(path))))


if __name__ == "__main__":
    main()
