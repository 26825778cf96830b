"""How much an import brings: the core closes, and layers and decoders need no job.

A closure is all that modules import when they are imported, and what that imports in turn; imports
of functions and under TYPE_CHECKING are not in it.
"""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "praxis_lite"
OUTSIDE_OF_CORE = {"jax", "flax", "optax", "numpy"}
OF_A_JOB = ("config", "job", "checkpoints", "experiment", "trainer", "modes")
# What `import praxis_lite` itself brings.
AT_THE_TOP = {"praxis_lite", "praxis_lite.public_names"}


def module_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def path_of(module):
    """Returns the file of a module of the library, or None if it is a name in a module."""
    path = ROOT.joinpath(*module.split("."))
    for file in (path / "__init__.py", path.with_suffix(".py")):
        if file.is_file():
            return file
    return None


def modules_in(folder):
    """Returns the modules of a folder that are imported, and not run."""
    paths = (LIBRARY / folder).rglob("*.py")
    return sorted(module_of(path) for path in paths if path.name != "__main__.py")


def statements(body):
    """Yields the imports that run when a file is imported."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from statements(ast.iter_child_nodes(node))


@functools.cache
def imports(module):
    """Returns the imports of a module: each name in full, and the module that it is in."""
    names = set()
    for node in statements(ast.parse(path_of(module).read_text(encoding="utf-8")).body):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        else:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(names)


@functools.cache
def closure(*modules):
    """Returns the modules of the library that an import of these brings."""
    seen, left = set(), list(modules)
    while left:
        module = left.pop()
        if module not in seen and module.startswith("praxis_lite") and path_of(module):
            seen.add(module)
            parts = module.split(".")
            left += [".".join(parts[:end]) for end in range(1, len(parts))]
            left += imports(module)
    return frozenset(seen)


def of_parts(modules, *parts):
    """Returns those of the modules that are in some parts of the library."""
    prefixes = tuple(f"praxis_lite.{part}" for part in parts)
    return sorted(
        one for one in modules if f"{one}.".startswith(tuple(f"{prefix}." for prefix in prefixes))
    )


def test_the_core_imports_itself_alone():
    brought = closure(*modules_in("core"))
    assert brought - AT_THE_TOP == set(modules_in("core"))


def test_the_core_needs_jax_flax_optax_and_numpy_and_nothing_else_from_outside():
    known = sys.stdlib_module_names | OUTSIDE_OF_CORE | {"praxis_lite"}
    for module in closure(*modules_in("core")):
        tops = {name.partition(".")[0] for name in imports(module)}
        assert tops <= known, module


@pytest.mark.slow
def test_an_import_of_all_of_the_core_loads_nothing_else_of_the_library():
    code = (
        "import importlib, sys\n"
        f"for name in {modules_in('core')!r}: importlib.import_module(name)\n"
        "print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    loaded = set(done.stdout.split())
    ours = {name for name in loaded if name.split(".")[0] == "praxis_lite"}
    assert ours - AT_THE_TOP == set(modules_in("core"))
    assert loaded & {"fiddle", "orbax.checkpoint", "tensorflow", "grain"} == set()


@pytest.mark.parametrize(
    "folder, parts",
    [
        ("layers", (*OF_A_JOB, "inputs", "optimizers")),
        ("decode", (*OF_A_JOB, "optimizers")),
    ],
)
def test_layers_and_decoders_need_no_job_and_no_optimizer(folder, parts):
    brought = {module: of_parts(closure(module), *parts) for module in modules_in(folder)}
    assert {module: found for module, found in brought.items() if found} == {}
