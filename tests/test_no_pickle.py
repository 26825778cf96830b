"""Nothing in the library turns data into code: no pickle, no eval, no YAML, no shell."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(path for name in ("praxis_lite", "praxis_tools", "tasks", "experiments")
               for path in (ROOT / name).rglob("*.py"))  # fmt: skip

# Modules that load objects, or that compile or run text.
MODULES = {
    "pickle", "_pickle", "pickletools", "cloudpickle", "dill", "joblib", "jsonpickle", "shelve",
    "marshal", "copyreg", "yaml", "ruamel", "code", "codeop", "runpy", "torch",
}  # fmt: skip
BUILTINS = {"eval", "exec", "compile", "__import__", "execfile"}
# What may be called of whatever module, by its name alone.
FUNCTIONS = {
    "system",
    "popen",
    "getoutput",
    "getstatusoutput",
    "read_pickle",
    "to_pickle",
    "unsafe_load",
    "full_load",
    "literal_exec",
    "dump_pickle",
    "load_pickle",
    "find_class",
} | {f"{verb}{how}" for verb in ("exec", "spawn") for how in ("l", "le", "lp", "v", "ve", "vp")}
# Who may do what is dangerous elsewhere, and why.
ALLOWED = {
    ("praxis_lite/inputs/processes/worker_process.py", "multiprocessing"): "to its own children",
    ("praxis_lite/inputs/processes/all_cores.py", "multiprocessing"): "to its own children",
    ("praxis_lite/core/callables.py", "import_module"): "of experiments, modes and configs",
    ("praxis_lite/public_names.py", "import_module"): "a package's own names, from its stub",
    ("praxis_lite/host/optional_packages.py", "import_module"): "of packages in its table",
    ("praxis_lite/config/settings_file.py", "yaml"): "`compose`, which builds nodes, no objects",
    ("praxis_lite/config/paths.py", "get_type_hints"): "annotations of code that is imported",
}


def dangers(source: str, file: str = "") -> Iterator[str]:
    """Yields the calls and imports of a source that could turn data into code."""
    for node in ast.walk(ast.parse(source)):
        for what in _dangers(node):
            if (file, what) not in ALLOWED:
                yield what


def _dangers(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from (item.name for item in node.names if item.name in BUILTINS | FUNCTIONS)
    elif isinstance(node, ast.Name) and node.id in BUILTINS:
        yield node.id
        return
    elif isinstance(node, ast.Attribute) and node.attr in FUNCTIONS:
        yield node.attr
        return
    elif isinstance(node, ast.Name) and node.id == "__builtins__":
        yield "builtins"
        return
    elif isinstance(node, ast.Call):
        yield from _of_call(node)
        return
    else:
        return
    for name in names:
        top = name.partition(".")[0]
        if top in MODULES or top in ("multiprocessing", "builtins"):
            yield top


def _of_call(node: ast.Call) -> Iterator[str]:
    name = ast.unparse(node.func).rpartition(".")[2]
    for keyword in node.keywords:
        if keyword.arg in ("allow_pickle", "shell") and ast.unparse(keyword.value) != "False":
            yield keyword.arg
    if name == "get_type_hints":
        yield name
    if name in ("import_module", "resolve_name") and not isinstance(node.args[0], ast.Constant):
        yield name
    # An attribute whose name is text: `getattr(os, "sys" + "tem")`.
    if name == "getattr" and len(node.args) > 1:
        word = node.args[1]
        if isinstance(word, ast.Constant) and word.value in BUILTINS | FUNCTIONS:
            yield word.value


@pytest.mark.slow
def test_no_data_becomes_code():
    actual = {}
    for file in FILES:
        name = str(file.relative_to(ROOT))
        actual[name] = list(dangers(file.read_text(encoding="utf-8"), name))
    assert len(actual) > 200
    assert {name: what for name, what in actual.items() if what} == {}


def test_every_exception_is_needed():
    for (file, what), _ in ALLOWED.items():
        assert what in list(dangers((ROOT / file).read_text(encoding="utf-8"))), (file, what)


PLANTED = {
    "import pickle": "pickle",
    "import pickle as p": "pickle",
    "from pickle import loads": "pickle",
    "def f():\n    import dill": "dill",
    "import cloudpickle": "cloudpickle",
    "import joblib": "joblib",
    "import shelve": "shelve",
    "import marshal": "marshal",
    "import yaml": "yaml",
    "from ruamel.yaml import YAML": "ruamel",
    "import multiprocessing": "multiprocessing",
    "from multiprocessing.connection import Client": "multiprocessing",
    "eval('7')": "eval",
    "f = eval": "eval",
    "exec(text)": "exec",
    "compile(text, 'f', 'exec')": "compile",
    "__import__(name)": "__import__",
    "import builtins": "builtins",
    "__builtins__.open": "builtins",
    "from builtins import exec": "exec",
    "getattr(x, 'eval')": "eval",
    "os.system(text)": "system",
    "from os import system": "system",
    "getattr(os, 'system')": "system",
    "os.popen(text)": "popen",
    "os.execvp(a, b)": "execvp",
    "subprocess.run(text, shell=True)": "shell",
    "subprocess.Popen(text, shell=is_shell)": "shell",
    "subprocess.getoutput(text)": "getoutput",
    "np.load(file, allow_pickle=True)": "allow_pickle",
    "np.save(file, x, allow_pickle=flag)": "allow_pickle",
    "import torch": "torch",
    "pd.read_pickle(file)": "read_pickle",
    "importlib.import_module(name)": "import_module",
    "pkgutil.resolve_name(name)": "resolve_name",
    "typing.get_type_hints(x)": "get_type_hints",
    "import runpy": "runpy",
}


def test_it_would_be_found():
    assert [item for item, what in PLANTED.items() if what not in dangers(item)] == []


HARMLESS = [
    "re.compile(x)", "step.lower(x).compile()", "ast.literal_eval(x)", "model.eval()",
    "np.load(file, allow_pickle=False)", "importlib.import_module('tensorflow')",
]  # fmt: skip


def test_what_only_looks_like_it_is_left_alone():
    assert [item for item in HARMLESS if list(dangers(item))] == []
