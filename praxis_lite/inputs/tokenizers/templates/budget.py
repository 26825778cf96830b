"""How much a chat template may do: characters, numbers, time; counted while a text is rendered."""

import contextlib
import contextvars
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from praxis_lite.core.errors import ConfigError

# Of the processor, for one conversation, and for each of its values more.
MOST_SECONDS, SECONDS_PER_VALUE = 0.25, 2e-4
MOST_CHARACTERS = 1 << 20  # Of one value; of all that are made, eight times as many.
MOST_BITS = 4096  # Of a whole number.
MOST_WIDTH = 10_000  # Of what is filled up with blanks.
# An element of a list takes as much memory as so many characters.
_ELEMENT = 16
_SIZED = (list, tuple, dict, set, frozenset)
_VIEWS = (type({}.keys()), type({}.values()), type({}.items()))


class TemplateTooLarge(ConfigError):
    """A template makes more than a conversation needs, or does not come to an end."""


class Budget:
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
            for item in level:
                if isinstance(item, str | bytes):
                    total += len(item)
                elif isinstance(item, int) and item.bit_length() > MOST_BITS:
                    self.require(float("inf"))
                elif isinstance(item, range):
                    total += _ELEMENT * len(item)
                elif isinstance(item, _SIZED + _VIEWS):
                    self.require(total + _ELEMENT * len(item) + _ELEMENT * len(inner))
                    inner.extend(item)
                    if isinstance(item, dict):
                        inner.extend(item.values())
                total += _ELEMENT + indent * depth
            self.require(total)
            level, depth = inner, depth + 1
        return total


_BUDGET: contextvars.ContextVar[Budget] = contextvars.ContextVar("_BUDGET")


@contextlib.contextmanager
def bounded(given: Any) -> Iterator[None]:
    """Bounds what templates do within; `given` is the conversation."""
    characters, values, level = 0, 0, [given]
    while level:
        values += len(level)
        characters += sum(len(item) for item in level if isinstance(item, str))
        level = [
            inner for element in level if isinstance(element, list | tuple | Mapping)
            for inner in (element.values() if isinstance(element, Mapping) else element)
        ]
    token = _BUDGET.set(Budget(characters, values))
    try:
        yield
    finally:
        _BUDGET.reset(token)


def current() -> Budget:
    """Returns the budget of the rendering that runs."""
    return _BUDGET.get()


def require_bounded(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises TemplateTooLarge for a call of a filter or method that would make too much.

    Args:
      args: the value, and what follows.
    """
    budget = current()
    value, *rest = args if args else (None,)
    rest = [*rest, *kwargs.values()]
    for item in rest:
        if isinstance(item, int | float) and abs(item) > MOST_WIDTH:
            raise TemplateTooLarge(
                f"The chat template gives {name} a number above {MOST_WIDTH:,}. Mend it, or take "
                "another."
            )
    size, others = budget.weight(value), [budget.weight(element) for element in rest]
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


def require_power(base: Any, exponent: Any) -> None:
    """Raises TemplateTooLarge for a power that has too many bits."""
    are_integers = isinstance(base, int) and isinstance(exponent, int) and exponent > 0
    if are_integers and base.bit_length() * exponent > MOST_BITS:
        raise TemplateTooLarge(
            f"The chat template computes a number of more than {MOST_BITS} bits. Mend it, or "
            "take another."
        )
