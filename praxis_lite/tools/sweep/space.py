"""Which of the settings of --set a sweep tries several values of, and which values."""

import dataclasses
import itertools
import math
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from praxis_lite.core.errors import ConfigError, require

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})(?::(log|linear))?")
_WORD, _QUOTED = re.compile(r"\w+"), re.compile(r"'[^']*'|\"[^\"]*\"")
_PAIRS = {"(": ")", "[": "]", "{": "}"}
# A range that spans so many times its lower end is searched by the logarithm.
_LOG_FROM = 10.0

# The value that a path has after settings; raises ConfigError.
ValueAfter = Callable[[Sequence[str], str], Any]


@dataclasses.dataclass(frozen=True)
class Values:
    """A setting and the texts of its values."""

    path: str
    texts: tuple[str, ...]

    def suggested(self, trial: Any) -> str:
        """Returns the text of a value that Optuna chooses."""
        return trial.suggest_categorical(self.path, self.texts)

    def examples(self) -> tuple[str, ...]:
        """Returns texts to check: all of them."""
        return self.texts

    def __str__(self) -> str:
        return f"{self.path}: {', '.join(self.texts)}"


@dataclasses.dataclass(frozen=True)
class Range:
    """A setting that is a number from `low` to `high`, of any size or whole."""

    path: str
    low: float
    high: float
    is_log: bool

    def suggested(self, trial: Any) -> str:
        """Returns the text of a number that Optuna chooses."""
        is_whole = type(self.low) is int
        suggest = trial.suggest_int if is_whole else trial.suggest_float
        return repr(suggest(self.path, self.low, self.high, log=self.is_log))

    def examples(self) -> tuple[str, ...]:
        """Returns texts to check: both ends."""
        return repr(self.low), repr(self.high)

    def __str__(self) -> str:
        kind = "whole numbers " if type(self.low) is int else ""
        scale = ", by the logarithm" if self.is_log else ""
        return f"{self.path}: {kind}{self.low!r} to {self.high!r}{scale}"


@dataclasses.dataclass(frozen=True)
class Space:
    """The settings of a sweep.

    Attributes:
      fixed: settings that all trials have, `path=value` each.
      searched: settings with several values.
    """

    fixed: tuple[str, ...]
    searched: tuple[Values | Range, ...]

    def combinations(self) -> Iterator[dict[str, str]]:
        """Yields each combination of values by path; raises ConfigError if a range has no list."""
        for item in self.searched:
            require(
                isinstance(item, Values), f"{item.path} of --search=grid", str(item),
                "a list of values", "A range needs --search=random or --search=tpe.",
            )
        for texts in itertools.product(*(item.texts for item in self.searched)):
            yield dict(zip((item.path for item in self.searched), texts, strict=True))

    def to_check(self) -> Iterator[list[str]]:
        """Yields settings of trials, until each value to try was in some."""
        first = {item.path: item.examples()[0] for item in self.searched}
        for item in self.searched:
            for text in item.examples():
                yield self.settings({**first, item.path: text})

    def settings(self, values: dict[str, str]) -> list[str]:
        """Returns the settings of a trial, `path=value` each."""
        return [*self.fixed, *(f"{path}={text}" for path, text in values.items())]


def space_of(settings: Sequence[str], value_after: ValueAfter) -> Space:
    """Returns the settings of --set, told apart by what each field may hold.

    Commas outside of brackets and quotes part values to try, where the field holds a single value.
    Where it holds a sequence, they part its items, as always. Where it holds a text, the texts to
    try are words, or each is in quotes. `LOW..HIGH` is a range of numbers,
    by the logarithm if HIGH is at least ten times LOW, or as `:log` or `:linear` behind it says.

    Raises:
      ConfigError: there is no such field or value, a list may be meant either way, or nothing is
        to be tried.
    """
    fixed, searched, before = [], [], []
    for setting in settings:
        path, _, text = setting.partition("=")
        item = _searched(path.strip(), text.strip(), setting, before, value_after)
        if item is None:
            fixed.append(setting)
            before.append(setting)
        else:
            searched.append(item)
            before.append(f"{item.path}={item.examples()[0]}")
    paths = [item.path for item in searched]
    for path in paths:
        given = sum(setting.partition("=")[0].strip() == path for setting in settings)
        require(given == 1, f"--set {path}: how often it is given", given, "once, with all values")
    if not searched:
        raise ConfigError(
            "--mode=sweep has nothing to try: give a setting several values, such as --set "
            "task.learner.learning_rate=1e-3,3e-3, or a range, 1e-4..1e-2."
        )
    return Space(tuple(fixed), tuple(searched))


def _searched(
    path: str, text: str, setting: str, before: Sequence[str], value_after: ValueAfter
) -> Values | Range | None:
    """Returns the values to try of a setting, or None if it has a single value."""
    is_range, items = _RANGE.fullmatch(text), items_of(text)
    if not is_range and len(items) < 2:
        return None
    present = value_after([*before], path)  # There is such a field, whatever its value.
    try:
        whole = value_after([*before, setting], path)
    except ConfigError:
        whole = None
    else:
        if is_range and isinstance(whole, str):
            return None
    if is_range:
        return _range(path, *is_range.groups(), before, value_after)
    if isinstance(whole, str):
        if not all(map(_QUOTED.fullmatch, items)) and not all(
            isinstance(word, str) and _WORD.fullmatch(word) for word in (present, *items)
        ):
            raise _ambiguous(
                setting, f'"{text}"', ",".join(f'"{item}"' for item in items), len(items)
            )
    elif isinstance(whole, tuple | list | set | frozenset | dict):
        if isinstance(present, type(whole)) or not _all_accepted(path, items, before, value_after):
            return None
        several = ",".join(f"({item!r},)" for item in items)
        raise _ambiguous(setting, repr(tuple(items)), several, len(items))
    for item in items:
        value_after([*before, f"{path}={item}"], path)
    return Values(path, tuple(dict.fromkeys(items)))


def _ambiguous(setting: str, single: str, several: str, count: int) -> ConfigError:
    path = setting.partition("=")[0]
    words = (shlex.quote(f"{path}={text}") for text in (single, several))
    return ConfigError(
        f"--set {setting} may be a single value with commas, or {count} values to try. Write --set "
        f"{next(words)} for a single value, or --set {next(words)} for values to try."
    )


def _all_accepted(
    path: str, items: Sequence[str], before: Sequence[str], value_after: ValueAfter
) -> bool:
    try:
        for item in items:
            value_after([*before, f"{path}={item}"], path)
    except ConfigError:
        return False
    return True


def _range(
    path: str, low: str, high: str, scale: str | None, before: Sequence[str],
    value_after: ValueAfter,
) -> Range:
    ends = [value_after([*before, f"{path}={end}"], path) for end in (low, high)]
    for end, text in zip(ends, (low, high), strict=True):
        is_number = isinstance(end, int | float) and math.isfinite(end)
        require(is_number, f"--set {path}: the end {text} of the range", end, "a number")
    require(
        ends[0] < ends[1], f"--set {path}={low}..{high}: its lower end", ends[0],
        f"below its upper end {ends[1]}",
    )
    is_log = scale == "log" or (scale is None and 0 < _LOG_FROM * ends[0] <= ends[1])
    require(
        not is_log or ends[0] > 0, f"--set {path}={low}..{high}:log: its lower end", ends[0],
        "above 0",
    )
    if type(ends[0]) is not type(ends[1]):
        ends = [float(end) for end in ends]
    return Range(path, *ends, is_log)


def items_of(text: str) -> list[str]:
    """Returns the items between commas outside of brackets and quotes; an empty last item goes."""
    items, closing, quote = [""], [], ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in _PAIRS:
            closing.append(_PAIRS[letter])
        elif closing and letter == closing[-1]:
            closing.pop()
        elif letter == "," and not closing:
            items.append("")
            continue
        items[-1] += letter
    items = [item.strip() for item in items]
    return items[:-1] if len(items) > 1 and not items[-1] else items
