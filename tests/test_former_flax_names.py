"""Names of Flax NNX that go, or that were renamed: none of our code uses them."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("praxis_lite", "praxis_tools", "experiments", "tasks", "examples", "benchmarks")
# By flax 0.12.12: lifted transforms' prefixes, hooks of variables, names with a warning.
GONE = {
    "StateAxes",
    "StateSharding",
    "on_get_value",
    "on_set_value",
    "on_create_value",
    "on_add_axis",
    "on_remove_axis",
    "add_hooks",
    "sharding_names",
    "abstract_with_sharding",
    "vars_as",
}
# `sharding` is a name of JAX's too: it is Flax's where it describes a variable.
DESCRIBES = {"Variable", "Param", "with_metadata", "with_partitioning", "set_metadata", "BatchStat"}


def former_names(text):
    """Yields the line and the name of each use in a module's text; comments do not count."""
    for node in ast.walk(ast.parse(text)):
        names = [
            getattr(node, "attr", None),
            getattr(node, "id", None),
            getattr(node, "arg", None),
            node.value if isinstance(node, ast.Constant) else None,
            *(alias.name for alias in getattr(node, "names", []) if isinstance(alias, ast.alias)),
        ]
        yield from ((node.lineno, name) for name in names if isinstance(name, str) and name in GONE)
        if not isinstance(node, ast.Call):
            continue
        function = getattr(node.func, "attr", getattr(node.func, "id", None))
        keywords = {keyword.arg for keyword in node.keywords}
        if function in DESCRIBES and "sharding" in keywords:
            yield node.lineno, f"{function}(sharding=)"
        of = getattr(getattr(node.func, "value", None), "id", None)
        key = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
        if of == "metadata" and function in ("get", "pop") and key == "sharding":
            yield node.lineno, "metadata.get('sharding')"


def test_none_of_our_code_uses_them():
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 300
    texts = {path.relative_to(ROOT): path.read_text() for path in files}
    # Only files with one of the words are parsed.
    word = re.compile("|".join(GONE | {r"sharding=", r"['\"]sharding['\"]"}))
    uses = [
        f"{path}:{line}: {name}"
        for path, text in texts.items()
        if word.search(text)
        for line, name in former_names(text)
    ]
    assert uses == []


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("nnx.vmap(f, in_axes=nnx.StateAxes({}))", "StateAxes"),
        ("from flax.nnx import StateSharding", "StateSharding"),
        ("nnx.Param(x, on_get_value=f)", "on_get_value"),
        ("metadata['sharding_names']", "sharding_names"),
        ("variable.sharding_names", "sharding_names"),
        ("nnx.Param(x, sharding=('a',))", "Param(sharding=)"),
        ("metadata.get('sharding')", "metadata.get('sharding')"),
        ("nnx.Param(x, out_sharding=('a',)); jax.device_put(x, sharding=s)", None),
    ],
)
def test_the_search_finds_them(text, name):
    assert next((found for _, found in former_names(text)), None) == name
