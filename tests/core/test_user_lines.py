"""How many lines a user writes to train a model that was not written for this library."""

import ast
from pathlib import Path

import pytest

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
MOST = 25
# What a user of plain functions brings; of other files it is the Flax modules.
MODEL_FUNCTIONS = {"functions": {"SIZES", "init", "mlp"}}


def is_flax_module(node):
    return isinstance(node, ast.ClassDef) and any(
        isinstance(base, ast.Attribute) and base.attr == "Module" for base in node.bases
    )


def is_experiment(node):
    return isinstance(node, ast.ClassDef) and any(
        isinstance(item, ast.Name) and item.id == "register" for item in node.decorator_list
    )


def names_of(node):
    """Returns the names that a statement at the top of a file defines."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return {node.name}
    return {name.id for name in ast.walk(node) if isinstance(name, ast.Name)
            and isinstance(name.ctx, ast.Store)}


def docstring_lines(node):
    lines = set()
    for item in ast.walk(node):
        if isinstance(item, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(item) is not None:
            lines |= set(range(item.body[0].lineno, item.body[0].end_lineno + 1))
    return lines


def user_lines(source, models=()):
    """Returns the lines of code of each registered experiment of a file.

    Its class, and whatever in the file that needs, by name: losses, rules, data. Not counted are
    blank lines, comments, docstrings, imports, the model (Flax modules, and the names `models`),
    and another experiment that it is a variant of, which has a count of its own.
    """
    text, tree = source.splitlines(), ast.parse(source)
    defined = {name: node for node in tree.body for name in names_of(node)}

    def lines_of(node):
        first = min([node.lineno, *(item.lineno for item in getattr(node, "decorator_list", ()))])
        lines = set(range(first, node.end_lineno + 1)) - docstring_lines(node)
        return {n for n in lines if text[n - 1].strip() and not text[n - 1].strip().startswith("#")}

    def needed(node, actual):
        actual.append(node)
        for name in {one.id for one in ast.walk(node) if isinstance(one, ast.Name)} - set(models):
            other = defined.get(name)
            if other is None or is_flax_module(other) or is_experiment(other) or other in actual:
                continue
            needed(other, actual)
        return actual

    counts = {}
    for node in filter(is_experiment, tree.body):
        counts[node.name] = len(set().union(*map(lines_of, needed(node, []))))
    return counts


def test_what_counts():
    source = '''
"""A file."""
import this

UNUSED = 3
RULES = (
    ("a", "b"),  # Said here.
)

class Mlp(nn.Module):
    size: int

def helper(x):
    """Says what."""
    return RULES

def loss(model, inputs, key):

    # A comment.
    return helper(init)

def init(key):
    return 0

@register
class One(Experiment):
    """A docstring
    of two lines."""

    def task(self):
        return loss, Mlp, init

@register
class Two(One):
    """Another."""
    size = 3
'''
    # RULES 3, helper 2, loss 2, the class 2, its method 2; then the class 2 and size.
    assert user_lines(source, {"init"}) == {"One": 11, "Two": 3}
    assert user_lines(source)["One"] == 13


@pytest.mark.parametrize("name", ["nnx_guide", "linen", "functions", "explicit"])
def test_an_experiment_with_a_foreign_model_takes_few_lines(name):
    counts = user_lines((EXPERIMENTS / f"{name}.py").read_text(), MODEL_FUNCTIONS.get(name, ()))
    assert counts and max(counts.values()) <= MOST, counts
