"""The table of a sweep's trials, and the settings of the best."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from praxis_lite.core.errors import printable
from praxis_lite.run.text_table import table_lines
from praxis_lite.tools.sweep.study import Study


def report(study: Study, directory: Path) -> str:
    """Returns the trials as a table, '*' before the best, and its settings as --set has them."""
    sweep, records, best = study.settings, study.records(), study.best()
    paths = list(sweep.space.searched)
    rows = [["", "trial", *_short(paths), sweep.metric, "step", "status"]]
    for record in records:
        value = "" if record.value is None else f"{record.value:.6g}"
        rows.append([
            "*" if record == best else "", str(record.number),
            *(_shown(record.values.get(path, "")) for path in paths), value,
            "" if record.step is None else str(record.step), record.status,
        ])
    lines = table_lines(rows, right={1, len(paths) + 2, len(paths) + 3})
    lines += [f"trial {x.number} {x.status}: {x.reason}" for x in records if x.reason]
    if best is None:
        lines.append("no trial is complete, so none is the best")
    else:
        settings = shlex.join(sweep.space.settings(best.values))
        lines += [
            f"the best is trial {best.number}, {sweep.metric} {best.value:.6g}: "
            f"{directory / 'trials' / f'{best.number:04d}'}",
            f"    --exp={sweep.experiment} --set {settings}",
        ]
    return printable("\n".join(lines))


def _short(paths: Sequence[str]) -> list[str]:
    """Returns the last parts of paths, as many as tell them apart."""
    short = []
    for path in paths:
        parts = path.split(".")
        ends = [".".join(parts[-count:]) for count in range(1, len(parts) + 1)]
        unique = (
            end for end in ends if sum(f".{other}".endswith(f".{end}") for other in paths) == 1
        )
        short.append(next(unique, path))
    return short


def _shown(text: str) -> str:
    """Returns a fraction with at most four digits, any other text unchanged."""
    if text.isdecimal():
        return text
    try:
        number = float(text)
    except ValueError:
        return text
    short = f"{number:.4g}"
    return short if len(short) < len(text) else text
