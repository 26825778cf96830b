"""A job's results as a person wants to read them, from the files in its directory."""

import textwrap
from statistics import fmean

from praxis_lite.run.goodput.goodput import goodput_of
from praxis_lite.run.job.job_dir import COMMAND_LINE, JobDir
from praxis_lite.run.text_table import table_lines
from praxis_lite.run.trainer.metrics.json_lines import lines_if_any
from praxis_lite.run.trainer.metrics.progress import metric_text
from praxis_lite.run.trainer.metrics.records import read_records
from praxis_lite.run.trainer.metrics.step_times import HFU, MFU, STEP_TIME, TIMES


def summary(job: JobDir, *, num_prompts: int = 3) -> str:
    """Returns losses, evaluations, where the time went, continuations, where everything lies."""
    parts = [
        _training(job), _evaluations(job), _time(job), _times_of_a_step(job),
        *(text for _, _, text in continuations(job, num_prompts)), _places(job),
    ]
    return "\n\n".join(part for part in parts if part)


def continuations(job: JobDir, num_prompts: int) -> list[tuple[str, int, str]]:
    """Returns (dataset, step, text) of the newest decode file of each dataset.

    The text has a few prompts and their continuations. Raises ConfigError if a file is damaged.
    """
    parts = []
    for directory in sorted((job.path / "decode").glob("*")):
        files = [file for file in directory.glob("*.jsonl") if file.stem.isdecimal()]
        files.sort(key=lambda file: int(file.stem))
        if not files:
            continue
        records, step = read_records(files[-1]), int(files[-1].stem)
        # A command line adds its records to those of others before.
        shown = records[-num_prompts:] if directory.name == COMMAND_LINE else records[:num_prompts]
        number = "" if len(shown) == len(records) else f", {len(shown)} of {len(records)}"
        lines = [f"Continuations ({directory.name}, step {step}{number})"]
        for record in shown:
            lines.append(_block("prompt", str(record.get("prompt", ""))))
            lines.append(_block("  goes on", str(record.get("continuation", ""))))
        parts.append((directory.name, step, "\n".join(lines)))
    return parts


def _training(job: JobDir) -> str:
    if not (lines := lines_if_any(job.metrics_jsonl)):
        return ""
    marks = [lines[0], *(lines[len(lines) * part // 4] for part in (1, 2, 3)), lines[-1]]
    steps = "  ".join(f"{line['step']:>8}" for line in marks)
    losses = "  ".join(f"{metric_text(line['loss']):>8}" for line in marks)
    return f"Training\n  step  {steps}\n  loss  {losses}"


def _evaluations(job: JobDir) -> str:
    newest = {line["dataset"]: line for line in lines_if_any(job.eval_metrics_jsonl)}
    lines = []
    for dataset, line in newest.items():
        values = {n: v for n, v in line.items() if n not in ("step", "dataset")}
        gzip = values.pop("gzip_bits_per_byte", None)
        text = "  ".join(f"{name} {metric_text(value)}" for name, value in values.items())
        lines.append(f"  {dataset}, step {line['step']}: {text}")
        if gzip is not None:
            lines.append(
                f"  {' ' * len(dataset)}  (gzip -9 needs {gzip:.4f} bits per byte for this text)"
            )
    return "\n".join(["Evaluation", *lines]) if lines else ""


def _time(job: JobDir) -> str:
    if (goodput := goodput_of(job)) is None:
        return ""
    return "Where the time went\n" + textwrap.indent(str(goodput), "  ")


def _times_of_a_step(job: JobDir) -> str:
    """Returns the means of the columns that clocks fill; dispatch and devices overlap the rest."""
    lines = [line for line in lines_if_any(job.metrics_jsonl) if line.keys() >= set(TIMES)]
    if not lines:
        return ""
    means = {name: fmean(line[name] for line in lines) for name in TIMES}
    rows = [
        (f"  {name}", f"{mean:.4g} s", f"{mean / means[STEP_TIME]:.1%}")
        for name, mean in means.items()
    ]
    for name in (MFU, HFU):
        if known := [line for line in lines if name in line]:
            seconds = sum(line[STEP_TIME] for line in known)
            share = sum(line[name] * line[STEP_TIME] for line in known) / seconds
            rows.append((f"  {name}", "", f"{share:.1%}"))
    count = "1 step" if len(lines) == 1 else f"{len(lines):,} steps"
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
