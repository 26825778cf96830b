"""Public names are on a page, stay importable, and are all that our code for users imports."""

import ast
import importlib
import re
from pathlib import Path

from praxis_lite.main import MODES, PROGRAMS
from praxis_lite.public_names import PACKAGES, homes_of
from tests.support import api_page
from tests.support.every_case import assert_each

ROOT = Path(__file__).parents[1]
CODE = sorted(
    path
    for folder in ("experiments", "tasks", "examples")
    for path in (ROOT / folder).glob("[!_]*.py")
)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# They are for whoever changes the library, and name its files.
ABOUT_THE_LIBRARY = {"architecture.md", "check_defects.md", "how_to_add.md", "upstream.md"}


def blocks(page):
    """Returns the Python of a page: what stands between fences, and lines that import."""
    text = page.read_text(encoding="utf-8")
    fenced = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    indented = re.findall(r"^    ((?:from|import) praxis_(?:lite|tools).*)$", text, re.MULTILINE)
    return fenced + indented


def imports(source):
    """Yields (module, name) of what a source imports; the name of a module is ""."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)


def private(source):
    """Returns the names of our packages that a source imports though they are not public."""
    ours = ("praxis_lite", "praxis_tools")
    of_ours = {pair for pair in imports(source) if pair[0].startswith(ours)}
    return sorted(
        (module, name)
        for module, name in of_ours
        if f"{module}.{name}".removesuffix(".") not in PACKAGES
        and not (module in PACKAGES and name in homes_of(module))
    )


def test_our_own_experiments_tasks_and_examples_import_public_names_alone():
    used = {str(path): private(path.read_text(encoding="utf-8")) for path in CODE}
    assert {path: names for path, names in used.items() if names} == {}


def test_pages_import_public_names_alone():
    assert_each(check_page, ((page.name, page) for page in PAGES))


def check_page(page):
    assert [pair for block in blocks(page) for pair in private(block)] == []
    if page.name not in ABOUT_THE_LIBRARY:
        text = page.read_text(encoding="utf-8")
        modules = re.findall(r"python -m (praxis_(?:lite|tools)[\w.]*\w)", text)
        assert set(modules) <= {"praxis_lite"}
        commands = re.findall(r"(?:^ *|`)praxis ([a-z_]+)\b(?!\.)", text, re.MULTILINE)
        assert set(commands) <= {*MODES, *PROGRAMS}


def test_tools_import_only_public_names_and_those_in_all():
    names = names_for_tools()
    homes = {(home, name) for package in PACKAGES for name, home in homes_of(package).items()}
    for path in sorted((ROOT / "praxis_tools").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        used = {(module, name) for module, name in private(source) if module.startswith("praxis_l")}
        modules = {name: f"{module}.{name}" for module, name in used if is_module(module, name)}
        attributes = {
            (modules[node.value.id], node.attr)
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in modules
            and not node.attr.startswith("__")
        }
        of_modules = {(module, name) for module, name in used if name not in modules}
        unknown = {
            (module, name)
            for module, name in (of_modules | attributes) - homes
            if name not in names.get(module, ())
        }
        assert not unknown, path


def names_for_tools():
    names = {}
    for path in sorted((ROOT / "praxis_lite").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            is_literal = isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
            if module not in PACKAGES and is_literal and ast.unparse(node.targets[0]) == "__all__":
                names[module] = ast.literal_eval(node.value)
    return names


def is_module(package, name):
    path = ROOT.joinpath(*package.split("."), name)
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def test_pages_have_imports_to_look_at():
    assert sum(len(list(imports(block))) for page in PAGES for block in blocks(page)) > 60


def test_the_page_of_public_names_is_of_today():
    expected = api_page.page()
    actual = api_page.PAGE.read_text(encoding="utf-8")
    assert actual == expected, "run python -m tests.support.api_page --write"


def test_each_task_and_experiment_of_ours_is_public():
    for folder in ("tasks", "experiments"):
        public = {name for name in PACKAGES if name.startswith(f"praxis_lite.{folder}.")}
        files = {path.stem for path in (ROOT / folder).glob("*.py")} - {"__init__"}
        assert {name.rpartition(".")[2] for name in public} == files


def test_a_name_is_public_where_it_is_defined_or_shown():
    for package in PACKAGES:
        for name, home in homes_of(package).items():
            shown = getattr(importlib.import_module(package), name)
            if home != package:
                assert shown is getattr(importlib.import_module(home), name), (package, name)
