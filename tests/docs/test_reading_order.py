"""docs/reading_order.md lists all of the core, and no file needs one of a later row."""

import ast
import re
from pathlib import Path

from tests.test_import_direction import imports

ROOT = Path(__file__).parents[2]
CORE = ROOT / "praxis_lite/core"
PAGE = (ROOT / "docs/reading_order.md").read_text(encoding="utf-8")
SECTION = PAGE.split("## Reading order")[1].split("\n## ")[0]
ROWS = [
    [re.findall(r"`([\w/.]+)`", cell) for cell in line.split(" | ")[:2]]
    for line in SECTION.splitlines()
    if line.startswith("| `")
]


def files_of(names):
    """Returns the files of the core that names in a cell stand for: files, or all of a folder."""
    return {
        path
        for name in names
        for path in ([CORE / name] if name.endswith(".py") else (CORE / name).glob("*.py"))
        if path.name != "__init__.py"
    }


FILES = [files_of([*read, *beside]) for read, beside in ROWS]


def num_lines(paths):
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def file_of(module):
    """Returns the file of a module of the library, or None if it is a name in a module."""
    path = ROOT.joinpath(*module.split("."))
    package = path / "__init__.py"
    file = package if package.is_file() else path.with_suffix(".py")
    return file if file.is_file() else None


def at_import(body):
    """Yields the imports that run when a file is imported: those of functions are not."""
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from at_import(ast.iter_child_nodes(node))


def closure(paths):
    """Returns the library's files that importing these brings, themselves included."""
    seen, todo = set(), list(paths)
    while todo:
        path = todo.pop()
        if path is None or path in seen:
            continue
        seen.add(path)
        names = {module_of(path), *at_import(ast.parse(path.read_text(encoding="utf-8")).body)}
        for name in names:
            parts = name.split(".")
            if parts[0] == "praxis_lite":  # The packages above a module are imported as well.
                todo += [file_of(".".join(parts[:n])) for n in range(1, len(parts) + 1)]
    return seen


def test_it_has_every_file_of_the_core_once():
    listed = [path for files in FILES for path in files]
    of_core = {path for path in CORE.rglob("*.py") if path.name != "__init__.py"}
    lacking = sorted(str(path.relative_to(CORE)) for path in of_core - set(listed))
    assert not lacking, "add them to a row of the reading order in docs/reading_order.md"
    assert sorted(listed) == sorted(of_core)


def test_what_it_lists_imports_hardly_anything_else():
    local = set().union(*FILES)
    assert num_lines(closure(local)) <= 1.2 * num_lines(local)
    first = {CORE / name for read, _ in ROWS for name in read}
    assert num_lines(closure(first)) <= 1.2 * num_lines(local)


def test_no_row_needs_a_later_one():
    row_of = {module_of(path): row for row, files in enumerate(FILES) for path in files}
    for path in sorted(set().union(*FILES)):
        for name in imports(path):
            needed = next((one for one in (name, name.rpartition(".")[0]) if one in row_of), None)
            if needed is not None:
                assert row_of[needed] <= row_of[module_of(path)], f"{path} imports {needed}"
