"""Summarizes a job's results as text, from the files in its directory."""

import textwrap
from collections.abc import Callable

import numpy as np

from praxis_lite.core.errors import ConfigError, printable
from praxis_lite.host.text_table import table_lines
from praxis_lite.job.job_dir import JobDir
from praxis_lite.trainer.metrics.columns import Columns, columns_in, columns_of
from praxis_lite.trainer.metrics.json_lines import read_json_lines
from praxis_lite.trainer.metrics.progress import metric_text
from praxis_lite.trainer.metrics.records import DecodedFile, decoded_files
from praxis_lite.trainer.metrics.step_times import HFU, MFU, STEP_TIME, TIMES

_NUM_PROMPTS = 3  # Number of prompts to show for each decoded dataset.


def summary(job: JobDir, *, more: Callable[[JobDir], str] = lambda job: "") -> str:
    """Returns a job's losses, evaluations, step times, decoded samples and files as text.

    Args:
      job: The job directory.
      more: Function that returns a section to show after the evaluations, or "".
    """
    columns = columns_in(job.metrics_jsonl)
    with np.errstate(all="ignore"):  # The columns may contain any numbers.
        parts = [
            _training(columns),
            _evaluations(job),
            more(job),
            _times_of_a_step(columns),
            *(text for _, _, text in continuations(job, _NUM_PROMPTS)),
            _files(job),
        ]
    return printable("\n\n".join(part for part in parts if part))


def continuations(job: JobDir, num_prompts: int) -> list[tuple[str, int, str]]:
    """Returns (dataset, step, text) for each dataset's newest file of decoded prompts.

    Args:
      job: The job's directory.
      num_prompts: Number of prompts and continuations in each text.

    Raises:
      ConfigError: A file cannot be read.
    """
    newest = {file.dataset: file for file in decoded_files(job)}
    return [(name, file.step, continuations_in(file, num_prompts)) for name, file in newest.items()]


def continuations_in(file: DecodedFile, num_prompts: int) -> str:
    """Returns the first prompts in a file and their continuations as text; see `continuations`."""
    try:
        decoded = file.read(num_prompts)
    except OSError as error:
        raise ConfigError(
            f"{file.path} cannot be read ({error.strerror or error}). Remove it, and decode again."
        ) from None
    num_shown, num_lines = len(decoded.pairs), decoded.num_lines
    heading = f"Continuations ({file.dataset}, step {file.step}"
    if num_shown < num_lines:
        heading += f", {num_shown} of {num_lines}"
    if decoded.num_unreadable:
        heading += f", unreadable lines: {decoded.num_unreadable}"
    lines = [f"{heading})"]
    for prompt, text in decoded.pairs:
        lines += [_block("prompt", prompt), _block("   output", text)]
    return "\n".join(lines)


def _training(columns: Columns) -> str:
    steps = columns["step"]
    if "loss" not in columns:
        return ""
    rows = [0, *(len(steps) * quarter // 4 for quarter in (1, 2, 3)), -1]
    numbers = "  ".join(f"{steps[row]:>8}" for row in rows)
    losses = "  ".join(f"{metric_text(columns['loss'][row]):>8}" for row in rows)
    return f"Training\n  step  {numbers}\n  loss  {losses}"


def _evaluations(job: JobDir) -> str:
    # The file may not be sorted, because other processes append evaluations of earlier steps.
    by_step = sorted(read_json_lines(job.eval_metrics_jsonl), key=lambda line: line["step"])
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
    """Returns a table of mean step times. The dispatch and device times overlap with the others."""
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
            has_value = is_known & np.isfinite(columns[name])
            times = columns[STEP_TIME][has_value]
            utilization = (columns[name][has_value] * times).sum() / times.sum()
            rows.append((f"  {name}", "", f"{utilization:.1%}"))
    num_steps = is_known.sum()
    count = "1 step" if num_steps == 1 else f"{num_steps:,} steps"
    heading = f"Mean times of {count}, and their shares of step_time"
    return "\n".join([heading, *table_lines(rows, right=(1, 2))])


def _block(name: str, text: str) -> str:
    """Formats text as wrapped lines after a margin that contains `name`."""
    margin = f"  {name:<9} | "
    rows = [
        row or ""
        for line in text.splitlines() or [""]
        for row in (textwrap.wrap(line, 84, drop_whitespace=False) or [""])
    ]
    continuation_margin = " " * (len(margin) - 2) + "| "
    return "\n".join(
        (margin if i == 0 else continuation_margin) + row for i, row in enumerate(rows)
    )


def _files(job: JobDir) -> str:
    files = {
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
    lines = [f"  {name:<22}{job.shown(file)}" for name, file in files.items() if file.exists()]
    if job.tensorboard.exists():
        lines.append(
            f"  {'TensorBoard logs':<22}tensorboard --logdir={job.shown(job.tensorboard)} "
            "(after: pip install tensorboard)"
        )
    return "\n".join(["Files", *lines])
