"""The result of a sweep: a table of its trials, the settings of the best, and a picture."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from praxis_lite.core.errors import printable, shown
from praxis_lite.files.whole_files import write_picture
from praxis_lite.host.optional_packages import optional_module
from praxis_lite.run.text_table import table_lines
from praxis_lite.tools.sweep.settings import SweepSettings
from praxis_lite.tools.sweep.space import Range
from praxis_lite.tools.sweep.study import TrialRecord, best_of

_COLOURS = {"complete": "#1f5fa8", "pruned": "#e08e0b"}
# Values further apart than this are drawn by their logarithm.
_LOG_FROM = 20.0
_MOST_LETTERS = 24  # Of a value below the picture.


def report(sweep: SweepSettings, records: Sequence[TrialRecord], directory: Path) -> str:
    """Returns the trials as a table, '*' before the best, and its settings as --set has them."""
    paths = [item.path for item in sweep.space.searched]
    best = best_of(records, sweep.better)
    rows = [["", "trial", *_short(paths), sweep.metric, "step", "status"]]
    for record in records:
        value = "" if record.value is None else f"{record.value:.6g}"
        rows.append([
            "*" if record is best else "", str(record.number),
            *(_shown(record.values.get(path, "")) for path in paths), value,
            "" if record.step is None else str(record.step), record.status,
        ])
    lines = table_lines(rows, right={1, len(paths) + 2, len(paths) + 3})
    for record in records:
        if record.reason:
            lines.append(f"trial {record.number} {record.status}: {record.reason}")
    if best is None:
        lines.append("no trial is complete, so none is the best")
    else:
        settings = shlex.join(sweep.space.settings(dict(best.values)))
        lines += [
            f"the best is trial {best.number}, {sweep.metric} {best.value:.6g}: "
            f"{directory / 'trials' / f'{best.number:04d}'}",
            f"    --exp={sweep.experiment} --set {settings}",
        ]
    return printable("\n".join(lines))


def picture(sweep: SweepSettings, records: Sequence[TrialRecord], path: Path) -> None:
    """Draws the metric against each setting, a panel per setting, as a PNG.

    Raises:
      ConfigError: matplotlib is missing, or the file cannot be written.
    """
    figures = optional_module("matplotlib.figure", str(path))
    searched = sweep.space.searched
    figure = figures.Figure(figsize=(4.5 * len(searched), 4), layout="constrained")
    best = best_of(records, sweep.better)
    known = [record for record in records if record.value is not None]
    grid = figure.subplots(1, len(searched), sharey=True, squeeze=False)[0]
    for axes, item, name in zip(grid, searched, _short([x.path for x in searched]), strict=True):
        texts = item.examples() if not isinstance(item, Range) else ()
        places = _places(texts)
        for status, colour in _COLOURS.items():
            some = [record for record in known if record.status == status]
            axes.scatter(
                [_place(record.values[item.path], places) for record in some],
                [record.value for record in some], color=colour, label=status,
            )
        if best is not None:
            axes.scatter(
                [_place(best.values[item.path], places)], [best.value], marker="*", s=220,
                color="#d1495b", zorder=3, label="best",
            )
        numbers = [_place(record.values[item.path], places) for record in known]
        if places:
            # A text is no formula, whatever dollars it has.
            labels = [shown(_shown(text), _MOST_LETTERS) for text in texts]
            axes.set_xticks(range(len(texts)), labels=labels, parse_math=False)
        elif numbers and min(numbers) > 0 and max(numbers) > _LOG_FROM * min(numbers):
            axes.set_xscale("log")
        axes.set_xlabel(name)
        axes.grid(alpha=0.3)
    grid[0].set_ylabel(sweep.metric)
    grid[-1].legend()
    figure.suptitle(f"{sweep.experiment.rpartition('.')[2]}, {len(records)} trials")
    write_picture(path, figure, dpi=110)


def _places(texts: Sequence[str]) -> dict[str, float]:
    """Returns a place on the axis for each text, or {} if all are numbers."""
    try:
        for text in texts:
            float(text)
    except ValueError:
        return {text: float(number) for number, text in enumerate(texts)}
    return {}


def _place(text: str, places: dict[str, float]) -> float:
    return places[text] if places else float(text)


def _short(paths: Sequence[str]) -> list[str]:
    """Returns the last parts of paths, as many as tell them apart."""

    def last(path: str, count: int) -> str:
        return ".".join(path.split(".")[-count:])

    short = []
    for path in paths:
        count = 1
        while sum(last(other, count) == last(path, count) for other in paths) > 1:
            count += 1
        short.append(last(path, count))
    return short


def _shown(text: str) -> str:
    """Returns a fraction in a few digits, another text as it is."""
    if text.isdecimal():
        return text
    try:
        number = float(text)
    except ValueError:
        return text
    short = f"{number:.4g}"
    return short if len(short) < len(text) else text
