"""Where chat templates of strangers run: nothing of Python's is in reach, and all is bounded.

A template is a program. It may count to a million in a million loops, or write "x" ten to the ninth
times; each such step and each text that is made is counted here, whatever the thread or process.
"""

import functools
import inspect
import itertools
from collections.abc import Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from praxis_lite.inputs.tokenizers.templates.budget import (
    TemplateTooLarge,
    current,
    require_bounded,
    require_power,
)

MOST_SOURCE = 50_000  # Characters of a template; published ones have 30,000 at most.
MOST_NODES = 10_000  # Of a template's tree, which is compiled.
# Filters whose time is not that of reading their input once, and how much they are given.
_SLOW = ("pprint", "striptags", "sum", "urlize", "wordwrap", "xmlattr")
_MOST_OF_SLOW = 10_000
# Of no use in a conversation: what they give is random.
_RANDOM_FILTERS, _RANDOM_GLOBALS = ("random",), ("lipsum",)
# What Jinja itself adds to each call.
_OF_JINJA = ("_loop_vars", "_block_vars")


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which each loop, operator, filter and call is counted."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, **settings: Any):
        # Nothing is computed while a template is compiled, when nothing is counted.
        super().__init__(optimized=False, finalize=_output, **settings)
        for name in _RANDOM_FILTERS:
            self.filters.pop(name)
        for name in _RANDOM_GLOBALS:
            self.globals.pop(name)

    def bound_filters(self) -> None:
        """Counts the work of the filters and tests that are there now."""
        self.filters = {name: _counted(name, item) for name, item in self.filters.items()}
        self.tests = {name: _stepped(test) for name, test in self.tests.items()}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > MOST_SOURCE:
            raise TemplateTooLarge(
                f"The chat template has {len(source):,} characters; wanted are {MOST_SOURCE:,} at "
                "most. Take another."
            )
        tree = super()._parse(source, name, filename)
        if sum(1 for _ in itertools.islice(tree.find_all(nodes.Node), MOST_NODES + 1)) > MOST_NODES:
            raise TemplateTooLarge(
                f"The chat template has more than {MOST_NODES:,} parts. Take another."
            )
        return _with_steps(tree)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        if __obj in _OWN:
            return __obj(*args)
        budget = current()
        budget.step()
        # Jinja wraps `format` of a text.
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        given = {name: item for name, item in kwargs.items() if name not in _OF_JINJA}
        if isinstance(owner, str | bytes | int | float | list | dict | tuple):
            require_bounded(__obj.__name__, (owner, *args), given)
        else:
            budget.weight([*args, *given.values()])
        return budget.charge(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = current()
        if operator == "**":
            require_power(left, right)
        elif operator == "*":
            for value, count in ((left, right), (right, left)):
                if isinstance(count, int) and not isinstance(value, int | float):
                    budget.require(budget.weight(value) * max(count, 1))
        elif operator == "%" and isinstance(left, str | bytes):
            require_bounded("%", (left, right), {})
        elif operator == "+":
            budget.require(budget.weight(left) + budget.weight(right))
        return budget.charge(super().call_binop(context, operator, left, right))

    def concat(self, pieces: Any) -> str:  # Of all that a template, a macro or a block writes.
        budget, kept = current(), []
        for piece in pieces:
            kept.append(budget.charge(piece))
        return "".join(kept)

    def step(self) -> bool:
        return current().step()

    def joined(self, *parts: Any) -> str:
        """Returns parts joined: the operator `~`."""
        budget = current()
        budget.require(sum(map(budget.weight, parts)))
        return budget.charge("".join(map(str, parts)))

    def made(self, value: Any) -> Any:
        """Returns a list, tuple or dict that a template writes; nested lists grow fast."""
        return current().charge(value)

    def sliced(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        return current().charge(value[slice(start, stop, step)])


@jinja2.pass_context
def _output(context: Context, value: Any) -> Any:
    budget = current()
    budget.step()
    budget.weight(value)
    return value


def _call(name: str, args: Sequence[nodes.Expr] = ()) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), [*args], [], None, None)


def _with_steps(tree: nodes.Template) -> nodes.Template:
    """Returns a template whose loops, comparisons, lists, slices and `~` are counted."""

    def changed(node: nodes.Node) -> nodes.Node:
        for field, value in node.iter_fields():
            if isinstance(value, list):
                value[:] = [changed(one) if isinstance(one, nodes.Node) else one for one in value]
            elif isinstance(value, nodes.Node):
                setattr(node, field, changed(value))
        result = node
        if isinstance(node, nodes.For):
            node.body.insert(0, nodes.ExprStmt(_call("step")))
            if node.test is not None:
                node.test = nodes.And(_call("step"), node.test)
        elif isinstance(node, nodes.Compare):
            result = nodes.And(_call("step"), node)
        elif isinstance(node, nodes.Concat):
            result = _call("joined", node.nodes)
        elif isinstance(node, nodes.List | nodes.Dict) or (
            isinstance(node, nodes.Tuple) and node.ctx == "load"
        ):
            result = _call("made", [node])
        elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            ends = [item or nodes.Const(None) for item in
                    (node.arg.start, node.arg.stop, node.arg.step)]
            result = _call("sliced", [node.node, *ends])
        return result if result is node else result.set_lineno(node.lineno)

    tree = changed(tree)
    tree.set_environment(tree.environment)
    for node in tree.find_all(nodes.ExprStmt):
        node.set_lineno(node.lineno or 1)
    return tree


def _counted(name: str, function: Any) -> Any:
    """Returns a filter that is counted; its results become lists bit by bit."""
    skipped = int(hasattr(function, "jinja_pass_arg"))

    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        budget = current()
        budget.step()
        given = args[skipped:]
        require_bounded(name, given, kwargs)
        if name in _SLOW and sum(map(budget.weight, given)) > _MOST_OF_SLOW:
            raise TemplateTooLarge(
                f"The chat template's filter {name} is given more than {_MOST_OF_SLOW:,} "
                "characters. Mend it, or take another."
            )
        result = function(*args, **kwargs)
        if inspect.isgenerator(result):
            result = [budget.charge(item) for item in result]
        return budget.charge(result)

    return counted


def _stepped(function: Any) -> Any:
    @functools.wraps(function)
    def stepped(*args: Any, **kwargs: Any) -> Any:
        current().step()
        return function(*args, **kwargs)

    return stepped


class _Own:
    """The functions that are counted by themselves."""

    def __contains__(self, function: Any) -> bool:
        owner = getattr(function, "__self__", None)
        return isinstance(owner, Sandbox) and getattr(function, "__name__", "") in (
            "step", "joined", "made", "sliced",
        )


_OWN = _Own()
