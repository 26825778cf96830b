"""Where chat templates of strangers run: nothing of Python's is in reach, and all is bounded.

A template is a program. It may count to a million in a million loops, or write "x" ten to the ninth
times; each such step and each text that is made is counted here, whatever the thread or process.
"""

import contextlib
import contextvars
import functools
import inspect
import itertools
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from praxis_lite.core.errors import ConfigError

MOST_SOURCE = 50_000  # Characters of a template; published ones have 30,000 at most.
MOST_NODES = 10_000  # Of a template's tree, which is compiled.
# Of the processor, for one conversation, and for each of its values more.
MOST_SECONDS, SECONDS_PER_VALUE = 0.25, 2e-4
MOST_CHARACTERS = 1 << 20  # Of one value; of all that are made, eight times as many.
MOST_BITS = 4096  # Of a whole number.
MOST_WIDTH = 10_000  # Of what is filled up with blanks.
# An element of a list takes as much memory as so many characters.
_ELEMENT = 16
# Filters whose time is not that of reading their input once, and how much they are given.
_SLOW = ("pprint", "striptags", "sum", "urlize", "wordwrap", "xmlattr")
_MOST_OF_SLOW = 10_000
# Of no use in a conversation: what they give is random.
_RANDOM_FILTERS, _RANDOM_GLOBALS = ("random",), ("lipsum",)
# What Jinja itself adds to each call.
_OF_JINJA = ("_loop_vars", "_block_vars")
_SIZED = (list, tuple, dict, set, frozenset)
_VIEWS = (type({}.keys()), type({}.values()), type({}.items()))


class TemplateTooLarge(ConfigError):
    """A template makes more than a conversation needs, or does not come to an end."""


class _Budget:
    """The work that a rendering may still do.

    Args:
      characters, values: of the conversation, which widen what is allowed.
    """

    def __init__(self, characters: int, values: int):
        self.most = MOST_CHARACTERS + 4 * characters
        self._left = 8 * self.most
        self._seconds = MOST_SECONDS + SECONDS_PER_VALUE * values
        self._deadline = time.thread_time() + self._seconds

    def step(self) -> bool:
        if time.thread_time() > self._deadline:
            raise TemplateTooLarge(
                f"The chat template does not end within {self._seconds:.2g} s: its loops are too "
                "long. Mend it, or take another."
            )
        return True

    def require(self, size: float) -> None:
        if size > self.most:
            raise TemplateTooLarge(
                f"The chat template makes a value of more than {self.most:,} characters. Mend it, "
                "or take another."
            )

    def charge(self, value: Any) -> Any:
        """Returns a value that was made."""
        self.step()
        self._left -= self.weight(value)
        if self._left < 0:
            raise TemplateTooLarge(
                f"The chat template makes more than {8 * self.most:,} characters in all. Mend it, "
                "or take another."
            )
        return value

    def weight(self, value: Any, indent: int = 0) -> int:
        """Returns how many characters a value is, or its text would be, at the most allowed.

        Args:
          indent: of each level of what lies in lists.
        """
        if isinstance(value, str | bytes):
            self.require(len(value))
            return len(value)
        total, level, depth = 0, [value], 0
        while level:
            inner: list[Any] = []
            for one in level:
                if isinstance(one, str | bytes):
                    total += len(one)
                elif isinstance(one, int) and one.bit_length() > MOST_BITS:
                    self.require(float("inf"))
                elif isinstance(one, range):
                    total += _ELEMENT * len(one)
                elif isinstance(one, _SIZED + _VIEWS):
                    self.require(total + _ELEMENT * len(one) + _ELEMENT * len(inner))
                    inner.extend(one)
                    if isinstance(one, dict):
                        inner.extend(one.values())
                total += _ELEMENT + indent * depth
            self.require(total)
            level, depth = inner, depth + 1
        return total


_BUDGET: contextvars.ContextVar[_Budget] = contextvars.ContextVar("_BUDGET")


@contextlib.contextmanager
def bounded(given: Any) -> Iterator[None]:
    """Bounds what templates do within; `given` is the conversation."""
    characters, values, level = 0, 0, [given]
    while level:
        values += len(level)
        characters += sum(len(one) for one in level if isinstance(one, str))
        level = [
            inner for one in level if isinstance(one, list | tuple | Mapping)
            for inner in (one.values() if isinstance(one, Mapping) else one)
        ]
    token = _BUDGET.set(_Budget(characters, values))
    try:
        yield
    finally:
        _BUDGET.reset(token)


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
        self.filters = {name: _counted(name, one) for name, one in self.filters.items()}
        self.tests = {name: _stepped(one) for name, one in self.tests.items()}

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
        budget = _BUDGET.get()
        budget.step()
        # Jinja wraps `format` of a text.
        own = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        given = {name: one for name, one in kwargs.items() if name not in _OF_JINJA}
        if isinstance(own, str | bytes | int | float | list | dict | tuple):
            _require_bounded(__obj.__name__, (own, *args), given)
        else:
            budget.weight([*args, *given.values()])
        return budget.charge(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _BUDGET.get()
        if operator == "**":
            _require_power(left, right)
        elif operator == "*":
            for value, count in ((left, right), (right, left)):
                if isinstance(count, int) and not isinstance(value, int | float):
                    budget.require(budget.weight(value) * max(count, 1))
        elif operator == "%" and isinstance(left, str | bytes):
            _require_bounded("%", (left, right), {})
        elif operator == "+":
            budget.require(budget.weight(left) + budget.weight(right))
        return budget.charge(super().call_binop(context, operator, left, right))

    def concat(self, pieces: Any) -> str:  # Of all that a template, a macro or a block writes.
        budget, kept = _BUDGET.get(), []
        for piece in pieces:
            kept.append(budget.charge(piece))
        return "".join(kept)

    def step(self) -> bool:
        return _BUDGET.get().step()

    def joined(self, *parts: Any) -> str:
        """Returns parts joined: the operator `~`."""
        budget = _BUDGET.get()
        budget.require(sum(map(budget.weight, parts)))
        return budget.charge("".join(map(str, parts)))

    def made(self, value: Any) -> Any:
        """Returns a list, tuple or dict that a template writes; nested lists grow fast."""
        return _BUDGET.get().charge(value)

    def sliced(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        return _BUDGET.get().charge(value[slice(start, stop, step)])


@jinja2.pass_context
def _output(context: Context, value: Any) -> Any:
    budget = _BUDGET.get()
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
        found = node
        if isinstance(node, nodes.For):
            node.body.insert(0, nodes.ExprStmt(_call("step")))
            if node.test is not None:
                node.test = nodes.And(_call("step"), node.test)
        elif isinstance(node, nodes.Compare):
            found = nodes.And(_call("step"), node)
        elif isinstance(node, nodes.Concat):
            found = _call("joined", node.nodes)
        elif isinstance(node, nodes.List | nodes.Dict) or (
            isinstance(node, nodes.Tuple) and node.ctx == "load"
        ):
            found = _call("made", [node])
        elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            ends = [one or nodes.Const(None) for one in
                    (node.arg.start, node.arg.stop, node.arg.step)]
            found = _call("sliced", [node.node, *ends])
        return found if found is node else found.set_lineno(node.lineno)

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
        budget = _BUDGET.get()
        budget.step()
        given = args[skipped:]
        _require_bounded(name, given, kwargs)
        if name in _SLOW and sum(map(budget.weight, given)) > _MOST_OF_SLOW:
            raise TemplateTooLarge(
                f"The chat template's filter {name} is given more than {_MOST_OF_SLOW:,} "
                "characters. Mend it, or take another."
            )
        found = function(*args, **kwargs)
        if inspect.isgenerator(found):
            found = [budget.charge(one) for one in found]
        return budget.charge(found)

    return counted


def _stepped(function: Any) -> Any:
    @functools.wraps(function)
    def stepped(*args: Any, **kwargs: Any) -> Any:
        _BUDGET.get().step()
        return function(*args, **kwargs)

    return stepped


def _require_bounded(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises TemplateTooLarge for a call of a filter or method that would make too much.

    Args:
      args: the value, and what follows.
    """
    budget = _BUDGET.get()
    value, *rest = args if args else (None,)
    rest = [*rest, *kwargs.values()]
    for one in rest:
        if isinstance(one, int | float) and abs(one) > MOST_WIDTH:
            raise TemplateTooLarge(
                f"The chat template gives {name} a number above {MOST_WIDTH:,}. Mend it, or take "
                "another."
            )
    size, others = budget.weight(value), [budget.weight(one) for one in rest]
    texts = [one for one in rest if isinstance(one, str | bytes)]
    widths = [int(one) for one in rest if isinstance(one, int) and one > 0]
    if name == "replace" and len(texts) > 1 and isinstance(value, str | bytes):
        old, new = texts[:2]
        size += (value.count(old) if type(old) is type(value) else size + 1) * len(new)
    elif name == "join":
        separator = value if isinstance(value, str | bytes) else texts[0] if texts else ""
        size = max([size, *others]) * (1 + len(separator)) if separator else size + sum(others)
    elif name in ("indent", "wordwrap", "expandtabs", "batch"):
        fill = max([0, *widths, *map(len, texts)])
        lines = 1 + (value.count("\n") + value.count("\t") if isinstance(value, str) else 1)
        size += (size if name == "wordwrap" else lines) * fill
    elif name in ("format", "format_map", "%") and isinstance(value, str | bytes):
        text = value if isinstance(value, str) else value.decode("latin-1")
        # Widths that are computed, or of five digits.
        if re.search(r"%[^a-zA-Z%]*\*|\{[^{}]*\{|\d{5,}", text):
            raise TemplateTooLarge(
                "The chat template writes a number or a text with too great a width. Mend it, or "
                "take another."
            )
        width = max([0, *map(int, re.findall(r"\d+", text))])
        size += (text.count("%") + text.count("{")) * (width + sum(others))
    elif name == "tojson":
        size = 6 * budget.weight(value, indent=max([0, *widths, *map(len, texts)]))
    budget.require(size)


def _require_power(base: Any, exponent: Any) -> None:
    are_integers = isinstance(base, int) and isinstance(exponent, int) and exponent > 0
    if are_integers and base.bit_length() * exponent > MOST_BITS:
        raise TemplateTooLarge(
            f"The chat template computes a number of more than {MOST_BITS} bits. Mend it, or "
            "take another."
        )


class _Own:
    """The functions that are counted by themselves."""

    def __contains__(self, function: Any) -> bool:
        own = getattr(function, "__self__", None)
        return isinstance(own, Sandbox) and getattr(function, "__name__", "") in (
            "step", "joined", "made", "sliced",
        )


_OWN = _Own()
