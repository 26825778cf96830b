"""Parses the settings in --set into the search space of a sweep."""

import dataclasses
import itertools
import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from praxis_lite.core.errors import ConfigError, require
from praxis_lite.host.optional_packages import optional_module

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})(?::(log|linear))?")
_WORD, _QUOTED = re.compile(r"\w+"), re.compile(r"'[^']*'|\"[^\"]*\"")
_PAIRS = {"(": ")", "[": "]", "{": "}"}
# Ranges are searched on a logarithmic scale if the ratio between their ends is at least this large.
_LOG_FROM = 10.0

Distribution = Any  # A distribution of Optuna, which is an optional dependency.
# Takes (settings, path) and returns the value at the path after applying the settings.
ValueAfter = Callable[[Sequence[str], str], Any]


@dataclasses.dataclass(frozen=True)
class Space:
    """The search space of a sweep.

    Attributes:
      fixed: Settings shared by all trials, as `path=value`.
      searched: Maps the path of each searched setting to its distribution. The choices of a
        categorical distribution are strings.
    """

    fixed: tuple[str, ...]
    searched: Mapping[str, Distribution]

    def combinations(self) -> Iterator[dict[str, str]]:
        """Yields all combinations as {path: value}; raises ConfigError if a setting is a range."""
        for path, distribution in self.searched.items():
            if not hasattr(distribution, "choices"):
                raise ConfigError(
                    f"--search=grid cannot search a range ({describe(path, distribution)}). List "
                    "the values to try, or set --search=random or --search=tpe."
                )
        choices = (distribution.choices for distribution in self.searched.values())
        for texts in itertools.product(*choices):
            yield dict(zip(self.searched, texts, strict=True))

    def to_check(self) -> Iterator[list[str]]:
        """Yields settings for trials that together cover all values and both ends of all ranges."""
        first = {path: _examples(searched)[0] for path, searched in self.searched.items()}
        for path, distribution in self.searched.items():
            for text in _examples(distribution):
                yield self.settings({**first, path: text})

    def settings(self, values: Mapping[str, str]) -> list[str]:
        """Returns the settings of a trial, as `path=value`."""
        return [*self.fixed, *(f"{path}={text}" for path, text in values.items())]


def describe(path: str, distribution: Distribution) -> str:
    """Describes a searched setting and its values."""
    if hasattr(distribution, "choices"):
        return f"{path}: {', '.join(distribution.choices)}"
    kind = "integers " if type(distribution.low) is int else ""
    scale = ", on a logarithmic scale" if distribution.log else ""
    return f"{path}: {kind}{distribution.low!r} to {distribution.high!r}{scale}"


def text_of(value: str | float) -> str:
    """Formats a value chosen by Optuna for use in --set."""
    return value if isinstance(value, str) else repr(value)


def _examples(distribution: Distribution) -> Sequence[str]:
    """Returns the choices of a distribution or the two ends of its range."""
    if hasattr(distribution, "choices"):
        return distribution.choices
    return repr(distribution.low), repr(distribution.high)


def space_of(settings: Sequence[str], value_after: ValueAfter) -> Space:
    """Parses the settings in --set into fixed and searched settings.

    Commas outside of brackets and quotes separate the values to try. If the field's value is a
    sequence, the commas separate the items of a single sequence instead. Strings to try must be
    single words or be quoted. `LOW..HIGH` is a range of numbers, which is searched on a logarithmic
    scale if HIGH is at least ten times LOW; append `:log` or `:linear` to choose the scale.

    Args:
      settings: Settings as `path=value`.
      value_after: Function that takes (settings, path) and returns the value at the path after
        applying the settings.

    Raises:
      ConfigError: A field or value does not exist, a list is ambiguous, or no setting is searched.
    """
    searched: dict[str, Distribution] = {}
    fixed: list[str] = []
    before: list[str] = []  # The settings so far, with one value each.
    for setting in settings:
        path, _, text = map(str.strip, setting.partition("="))
        distribution = _distribution(path, text, setting, before, value_after)
        if distribution is None:
            fixed.append(setting)
            before.append(setting)
        else:
            searched[path] = distribution
            before.append(f"{path}={_examples(distribution)[0]}")
    for path in searched:
        count = sum(setting.partition("=")[0].strip() == path for setting in settings)
        if count > 1:
            raise ConfigError(
                f"--set contains {path} {count} times. Specify it once, with all values to try."
            )
    if not searched:
        raise ConfigError(
            "`praxis sweep` requires a setting to search. Set several values for a setting, such "
            "as --set task.learner.learning_rate=1e-3,3e-3, or a range, such as 1e-4..1e-2."
        )
    return Space(tuple(fixed), searched)


def _distribution(
    path: str, text: str, setting: str, before: Sequence[str], value_after: ValueAfter
) -> Distribution | None:
    """Returns the distribution of a setting, or None if it has a single value.

    Text with commas is ambiguous if the field also accepts the text as one string or sequence. To
    find out whether this is the case, the setting is applied.
    """
    is_range, items = _RANGE.fullmatch(text), items_of(text)
    if not is_range and len(items) < 2:
        return None
    current = value_after([*before], path)  # Raises if there is no such field.
    try:
        single = value_after([*before, setting], path)
    except ConfigError:
        single = None
    if is_range:
        if isinstance(single, str):
            return None
        low, high, scale = is_range.groups()
        return _range(path, low, high, scale, before, value_after)
    # The field accepts the text as one string. Several values must be quoted, or be single words.
    if isinstance(single, str):
        if not all(map(_QUOTED.fullmatch, items)) and not all(
            isinstance(word, str) and _WORD.fullmatch(word) for word in (current, *items)
        ):
            raise _ambiguous(
                setting, f'"{text}"', ",".join(f'"{item}"' for item in items), len(items)
            )
    # The field accepts the text as one sequence. This is ambiguous if it also accepts each item.
    elif isinstance(single, tuple | list | set | frozenset | dict):
        if isinstance(current, type(single)) or not _all_accepted(path, items, before, value_after):
            return None
        several = ",".join(f"({item!r},)" for item in items)
        raise _ambiguous(setting, repr(tuple(items)), several, len(items))
    for item in items:
        value_after([*before, f"{path}={item}"], path)
    distributions = optional_module("optuna.distributions", "praxis sweep")
    return distributions.CategoricalDistribution(tuple(dict.fromkeys(items)))


def _ambiguous(setting: str, single: str, several: str, count: int) -> ConfigError:
    path = setting.partition("=")[0]
    spellings = (shlex.quote(f"{path}={text}") for text in (single, several))
    return ConfigError(
        f"--set {setting} is ambiguous: it may be a single value with commas or {count} values to "
        f"try. Use --set {next(spellings)} for a single value, or --set {next(spellings)} for "
        "values to try."
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
    path: str,
    low: str,
    high: str,
    scale: str | None,
    before: Sequence[str],
    value_after: ValueAfter,
) -> Distribution:
    ends = [value_after([*before, f"{path}={end}"], path) for end in (low, high)]
    for end, text in zip(ends, (low, high), strict=True):
        is_number = isinstance(end, int | float) and math.isfinite(end)
        require(is_number, f"--set {path}: the range end {text}", end, "a number")
    require(
        ends[0] < ends[1],
        f"--set {path}={low}..{high}: the lower end",
        ends[0],
        f"a number below the upper end {ends[1]}",
    )
    is_log = scale == "log" or (scale is None and 0 < _LOG_FROM * ends[0] <= ends[1])
    require(
        not is_log or ends[0] > 0,
        f"--set {path}={low}..{high}:log: the lower end",
        ends[0],
        "a number above 0",
    )
    distributions = optional_module("optuna.distributions", "praxis sweep")
    if all(type(end) is int for end in ends):
        return distributions.IntDistribution(*ends, log=is_log)
    return distributions.FloatDistribution(*ends, log=is_log)


def items_of(text: str) -> list[str]:
    """Splits text at commas outside of brackets and quotes, and drops an empty last item."""
    items, closing, quote = [""], [], ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in _PAIRS:
            closing.append(_PAIRS[char])
        elif closing and char == closing[-1]:
            closing.pop()
        elif char == "," and not closing:
            items.append("")
            continue
        items[-1] += char
    items = [item.strip() for item in items]
    return items[:-1] if len(items) > 1 and not items[-1] else items
