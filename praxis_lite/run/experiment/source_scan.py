"""Classes found in a package's source text, with nothing imported."""

import ast
import dataclasses
import importlib.util
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path

# A package of experiments is far smaller than this.
_MOST_FILES = 1_000
_MOST_BYTES = 2**22

# What Python's parser raises of other text, NUL bytes, and brackets too deep.
_UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)

_MAY_REGISTER = re.compile(rb"^[ \t]*@(\w+\.)*register\b|\bregister as ", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Binding:
    """Where a name is bound at the top of a module.

    Attributes:
        name: `module.Name`.
        file: the source file.
        line: where the binding stands.
        is_registered: True if the class has `@register`; None if the name is imported or assigned,
            so that only the import can tell.
        summary: the first line of the docstring, or ''.
    """

    name: str
    file: Path
    line: int
    is_registered: bool | None
    summary: str


def exists(top: str) -> bool:
    """Returns True if `top` is a module or package on sys.path; imports nothing."""
    return bool(_roots(top))


def find(full: str) -> Binding | None:
    """Returns where `module.Name` is bound, or None."""
    module, _, name = full.rpartition(".")
    if not module:
        return None
    for file in _module_files(module):
        try:
            places = _places(file.read_bytes(), file, module)
        except _UNREADABLE:
            # The import shows the fault better than words about names.
            return Binding(full, file, 1, None, "")
        for place in places:
            if place.name == full:
                return place
    return None


def classes_of(top: str) -> list[Binding]:
    """Returns all classes in the source of the package (or module) `top`, by module."""
    return [place for source in _sources(top) for place in _classes(*source)]


def registered_in(top: str) -> list[Binding]:
    """Returns the classes with `@register` in the source of the package (or module) `top`."""
    # Parsing takes most of the time: a package such as jax has 300,000 lines.
    sources = (item for item in _sources(top) if _MAY_REGISTER.search(item[0]))
    return [place for source in sources for place in _classes(*source) if place.is_registered]


def first_line(docstring: str | None) -> str:
    """Returns the first line of a docstring, or ''."""
    return (docstring or "").strip().partition("\n")[0].strip()


def _roots(top: str) -> list[Path]:
    try:
        # Of a top name only: for a dotted one find_spec imports the parents.
        spec = importlib.util.find_spec(top)
    except (ValueError, ImportError):  # Imported without a spec: `__main__`; or refused.
        return []
    if spec is None:
        return []
    if spec.submodule_search_locations is not None:
        return [Path(folder) for folder in spec.submodule_search_locations]
    return [Path(spec.origin)] if spec.origin and spec.origin.endswith(".py") else []


def _module_files(module: str) -> Iterator[Path]:
    top, *rest = module.split(".")
    for root in _roots(top):
        base = root.joinpath(*rest)
        candidates = [base.joinpath("__init__.py")]
        candidates.append(base.with_name(f"{base.name}.py") if rest else base)
        yield from (file for file in candidates if file.is_file())


def _sources(top: str) -> Iterator[tuple[bytes, Path, str]]:
    for root in _roots(top):
        files = _python_files(root) if root.is_dir() else iter([root])
        for file in itertools.islice(files, _MOST_FILES):
            parts = file.relative_to(root).with_suffix("").parts if root.is_dir() else ()
            # Reading a pipe would wait, and a link may lead anywhere.
            if not file.is_file() or file.stat().st_size > _MOST_BYTES:
                continue
            if all(part.isidentifier() for part in parts):
                yield file.read_bytes(), file, ".".join([top, *parts]).removesuffix(".__init__")


def _python_files(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        # A virtual environment within the package has folders with other names.
        folders[:] = sorted(item for item in folders if item.isidentifier())
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(".py"))


def _classes(source: bytes, file: Path, module: str) -> list[Binding]:
    try:
        places = _places(source, file, module)
    except _UNREADABLE:
        return []
    return [place for place in places if place.is_registered is not None]


def _places(source: bytes, file: Path, module: str) -> list[Binding]:
    tree = ast.parse(source, str(file))
    places = []
    decorators = {"register"}
    for node in _statements(tree.body):
        if isinstance(node, ast.ImportFrom):
            decorators |= {a.asname for a in node.names if a.name == "register" and a.asname}
    for node in _statements(tree.body):
        if isinstance(node, ast.ClassDef):
            is_registered = any(_last_name(item) in decorators for item in node.decorator_list)
            summary = first_line(ast.get_docstring(node))
            name = f"{module}.{node.name}"
            places.append(Binding(name, file, node.lineno, is_registered, summary))
        for name in _bound_names(node):
            places.append(Binding(f"{module}.{name}", file, node.lineno, None, ""))
    return places


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements that run with the module: not those in functions or classes."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With | ast.For | ast.While):
            for block in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, block, []))
            for handler in getattr(node, "handlers", []):
                yield from _statements(handler.body)


def _bound_names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        node = node.func
    return getattr(node, "attr", None) or getattr(node, "id", "")
