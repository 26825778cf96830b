"""A job's results as text, from the files in its directory."""

import textwrap
from collections.abc import Callable

import numpy as np

from praxis_lite.core.errors import ConfigError, printable
from praxis_lite.host.text_table import table_lines
from praxis_lite.job.job_dir import JobDir
from praxis_lite.trainer.metrics.columns import Columns, columns_in, columns_of
from praxis_lite.trainer.metrics.json_lines import lines_if_any
from praxis_lite.trainer.metrics.progress import metric_text
from praxis_lite.trainer.metrics.records import DecodedFile, decoded_files
from praxis_lite.trainer.metrics.step_times import HFU, MFU, STEP_TIME, TIMES


def summary(
    job: JobDir, *, num_prompts: int = 3, more: Callable[[JobDir], str] = lambda job: ""
) -> str:
    """Returns losses, evaluations, times, continuations, and where everything is.

    Args:
      num_prompts: of each dataset whose continuations are shown.
      more: returns another section, which comes after the evaluations; "": none.
    """
    columns = columns_in(job.metrics_jsonl)
    with np.errstate(all="ignore"):  # The columns may contain any numbers.
        parts = [
            _training(columns), _evaluations(job), more(job), _times_of_a_step(columns),
            *(text for _, _, text in continuations(job, num_prompts)), _places(job),
        ]
    return printable("\n\n".join(part for part in parts if part))


def continuations(job: JobDir, num_prompts: int) -> list[tuple[str, int, str]]:
    """Returns (dataset, step, text) of the newest decode file of each dataset.

    The text has a few prompts and their continuations. Raises ConfigError if a file cannot be read.
    """
    newest = {file.dataset: file for file in decoded_files(job)}
    return [(name, file.step, _continuations(file, num_prompts)) for name, file in newest.items()]


def _continuations(file: DecodedFile, num_prompts: int) -> str:
    try:
        decoded = file.read(num_prompts)
    except OSError as error:
        raise ConfigError(
            f"{file.path} cannot be read ({error.strerror or error}). Take it away, and decode "
            "again."
        ) from None
    number, of = len(decoded.pairs), decoded.num_lines
    head = f"Continuations ({file.dataset}, step {file.step}"
    if number < of:
        head += f", {number} of {of}"
    if decoded.num_unreadable:
        head += f", unreadable lines: {decoded.num_unreadable}"
    lines = [f"{head})"]
    for prompt, text in decoded.pairs:
        lines += [_block("prompt", prompt), _block("  goes on", text)]
    return "\n".join(lines)


def _training(columns: Columns) -> str:
    steps = columns["step"]
    if "loss" not in columns:
        return ""
    marks = [0, *(len(steps) * part // 4 for part in (1, 2, 3)), -1]
    numbers = "  ".join(f"{steps[mark]:>8}" for mark in marks)
    losses = "  ".join(f"{metric_text(columns['loss'][mark]):>8}" for mark in marks)
    return f"Training\n  step  {numbers}\n  loss  {losses}"


def _evaluations(job: JobDir) -> str:
    # Another process may have added evaluations of earlier steps later.
    by_step = sorted(lines_if_any(job.eval_metrics_jsonl), key=lambda line: line["step"])
    newest = {str(line.get("dataset", "")): line for line in by_step}
    lines = []
    for dataset, line in newest.items():
        values = {
            name: columns[-1] for name, columns in columns_of([line]).items() if name != "step"
        }
        gzip = values.pop("gzip_bits_per_byte", None)
        text = "  ".join(f"{name} {metric_text(value)}" for name, value in values.items())
        lines.append(f"  {dataset}, step {line['step']}: {text}")
        if gzip is not None:
            lines.append(
                f"  {' ' * len(dataset)}  (gzip -9 needs {gzip:.4f} bits per byte for this text)"
            )
    return "\n".join(["Evaluation", *lines]) if lines else ""


def _times_of_a_step(columns: Columns) -> str:
    """Returns the means of the columns that clocks fill; dispatch and devices overlap the rest."""
    if not columns.keys() >= set(TIMES):
        return ""
    is_known = np.isfinite([columns[name] for name in TIMES]).all(axis=0)
    if not is_known.any():
        return ""
    means = {name: columns[name][is_known].mean() for name in TIMES}
    rows = [
        (f"  {name}", f"{mean:.4g} s", f"{mean / means[STEP_TIME]:.1%}")
        for name, mean in means.items()
    ]
    for name in (MFU, HFU):
        if name in columns:
            has = is_known & np.isfinite(columns[name])
            times = columns[STEP_TIME][has]
            share = (columns[name][has] * times).sum() / times.sum()
            rows.append((f"  {name}", "", f"{share:.1%}"))
    number = is_known.sum()
    count = "1 step" if number == 1 else f"{number:,} steps"
    head = f"The time of a step, on average of {count}, and its share of step_time"
    return "\n".join([head, *table_lines(rows, right=(1, 2))])


def _block(name: str, text: str) -> str:
    margin = f"  {name:<9} | "
    rows = [
        row or ""
        for line in text.splitlines() or [""]
        for row in (textwrap.wrap(line, 84, drop_whitespace=False) or [""])
    ]
    rest = " " * (len(margin) - 2) + "| "
    return "\n".join((margin if i == 0 else rest) + row for i, row in enumerate(rows))


def _places(job: JobDir) -> str:
    places = {
        "config": job.config_txt,
        "layout of the weights": job.layout_txt,
        "metrics of each step": job.metrics_jsonl,
        "evaluations": job.eval_metrics_jsonl,
        "time of each launch": job.timeline_jsonl,
        "loss curve": job.loss_curve_png,
        "checkpoints": job.checkpoints,
        "decoded": job.path / "decode",
        "evaluated, row by row": job.path / "eval",
    }
    there = [f"  {name:<22}{place}" for name, place in places.items() if place.exists()]
    if job.tensorboard.exists():
        there.append(
            f"  {'drawn by TensorBoard':<22}tensorboard --logdir={job.tensorboard} "
            "(after: pip install tensorboard)"
        )
    return "\n".join(["Where everything lies", *there])
