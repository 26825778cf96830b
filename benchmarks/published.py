"""Trains the experiments in experiments/published, and compares them with the published results.

    python -m benchmarks.published                                 # lists the rows
    python -m benchmarks.published names.mlp --seeds 5 --write     # updates docs/results.md
    python -m benchmarks.published mnist1d --steps 500             # all rows of mnist1d, 500 steps
    python -m benchmarks.published grokking --jobs /tmp/jobs       # resumes if it was interrupted
    python -m benchmarks.published grokking --meshes 1,3,1 1,4,2   # compares meshes

With `--meshes`, the losses of the first 50 steps on each mesh of simulated devices are compared
with those on one device. Then one seed is trained on each mesh, and its figure is reported.
"""

import argparse
import dataclasses
import datetime
import importlib.metadata
import itertools
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import fiddle as fdl
import jax
import numpy as np

import praxis_lite
from praxis_lite.config.experiment_overrides import configured
from praxis_lite.config.python_settings import as_texts
from praxis_lite.core import Partitioner, make_mesh, simulate_devices
from praxis_lite.experiment.registry import get_experiment

DOCS = Path(__file__).parents[1] / "docs"
# Number of steps to compare between meshes, and the largest relative difference of equal losses.
SHORT, LIMIT = 50, 1e-5
RATES = [2.0**-power for power in range(4, 12)]  # Learning rates for `transfer`.


@dataclasses.dataclass(frozen=True)
class Row:
    """A published result: a row of docs/results.md.

    Attributes:
      name: Name of the row. If it contains a dot, the part before the dot is the row's group.
      experiment: Name of the experiment in experiments/published.
      metric: Name of the metric on held-out data.
      published: The published figure.
      accepted: Smallest and largest mean that count as "reached".
      source: Where the figure is published.
      figure: Function that selects the figure from a curve: its last, smallest or largest value.
      wide: Name of a wider experiment, or None. If set, both experiments are trained with all
        RATES, and the figure is the ratio of their best learning rates.
    """

    name: str
    experiment: str
    metric: str
    published: str
    accepted: tuple[float, float]
    source: str
    figure: Callable[[np.ndarray], float] = np.min
    wide: str | None = None


def last(values: np.ndarray) -> float:
    """Returns the last value."""
    return float(values[-1])


NANOGPT, MAKEMORE = "karpathy/nanoGPT, README", "karpathy/makemore"
MNIST1D, LECTURE = "greydanus/mnist1d, README", "makemore, lecture 5"
METAL = "vglazer.github.io, training-on-metal"
ZOOLOGY, MUP = "arXiv:2312.04927, figure 2", "EleutherAI/nanoGPT-mup"
ROWS = [
    Row("char", "char.Char", "loss", "1.4697", (1.44, 1.49), NANOGPT),
    Row("char-start", "char.CharStart", "loss", "2.06 to 2.08", (2.04, 2.11), METAL, last),
    Row("char-cpu", "char.CharCpu", "loss", "1.88", (1.85, 1.92), NANOGPT, last),
    Row("names.mlp", "names.Mlp", "loss", "2.105", (2.08, 2.12), LECTURE, last),
    Row("names.wavenet", "names.WaveNet", "loss", "1.993", (1.97, 2.01), LECTURE, last),
    Row("names.transformer", "names.Transformer", "loss", "1.92", (1.88, 1.95), MAKEMORE),
    Row("mnist1d.logistic", "mnist1d.Logistic", "accuracy", "32%", (0.30, 0.35), MNIST1D, np.max),
    Row("mnist1d.mlp", "mnist1d.Mlp", "accuracy", "68%", (0.65, 0.71), MNIST1D, np.max),
    Row("mnist1d.cnn", "mnist1d.Cnn", "accuracy", "94%", (0.92, 0.97), MNIST1D, np.max),
    Row("mnist1d.gru", "mnist1d.Gru", "accuracy", "91%", (0.89, 0.96), MNIST1D, np.max),
    Row("grokking", "grokking.Grokking", "accuracy", "1", (0.98, 1), "stockeh/mlx-grokking", last),
    Row("addition", "addition.Addition", "loss", "0.0020 and 0.0085", (0, 0.0085), "flax seq2seq"),
    Row("mqar.attention", "mqar.Attention", "accuracy", "1", (0.98, 1), ZOOLOGY, last),
    Row("mqar.convolution", "mqar.Convolution", "accuracy", "< 1", (0, 0.9), ZOOLOGY, last),
    Row("transfer", "transfer.Narrow", "loss", "> 1", (2, np.inf), MUP, last, "transfer.Wide"),
]


@dataclasses.dataclass(frozen=True)
class Run:
    """A curve of a metric.

    Attributes:
      x: Steps, or learning rates in a sweep.
      values: The metric at each x.
      seconds: Total time of training steps and evaluations.
    """

    x: np.ndarray
    values: np.ndarray
    seconds: float


def train_and_evaluate(
    job_dir: Path, experiment: str, metric: str, settings: Mapping[str, Any]
) -> Run:
    """Trains an experiment, or resumes its job, and returns its curve on held-out data."""
    settings = {"run.trackers.tensorboard": None, **settings}
    model = praxis_lite.train(f"published.{experiment}", job_dir, settings=settings, progress=False)
    columns, metrics = model.evaluations["heldout"], model.metrics
    seconds = float(np.nansum(metrics["step_time"] + metrics["evaluation_time"]))
    return Run(columns["step"], columns[metric], seconds)


def measure_row(row: Row, job_dir: Path, settings: Mapping[str, Any]) -> tuple[float, Run]:
    """Returns a row's figure and curve. The curve of a sweep has the losses of the wide model."""
    if row.wide is None:
        run = train_and_evaluate(job_dir, row.experiment, row.metric, settings)
        return float(row.figure(run.values)), run

    def sweep(experiment: str) -> tuple[float, Run]:
        runs = [
            train_and_evaluate(
                job_dir / experiment / str(rate),
                experiment,
                row.metric,
                settings | {"learning_rate": rate},
            )
            for rate in RATES
        ]
        losses = np.array([row.figure(run.values) for run in runs])
        seconds = sum(run.seconds for run in runs)
        return RATES[int(np.nanargmin(losses))], Run(np.array(RATES), losses, seconds)

    (narrow, narrow_run), (wide, wide_run) = sweep(row.experiment), sweep(row.wide)
    seconds = narrow_run.seconds + wide_run.seconds
    return narrow / wide, dataclasses.replace(wide_run, seconds=seconds)


def first_losses(
    experiment: str, mesh: Sequence[int], num_steps: int, settings: Mapping[str, Any]
) -> np.ndarray:
    """Returns the training losses [num_steps] of the first steps on a mesh."""
    texts = as_texts({**settings, "mesh.ici_mesh_shape": tuple(mesh)})
    job = fdl.build(configured(get_experiment(f"published.{experiment}"), texts))
    partitioner = Partitioner(job.task, make_mesh(job.mesh))
    key, losses = partitioner.key(job.run.seed), []
    state = partitioner.init(key)
    for batch in itertools.islice(job.datasets["train"].batches(), num_steps):
        state, outputs = partitioner.train_step(state, partitioner.global_batch(batch), key)
        losses.append(outputs["metrics"]["loss"][0])
    return np.array(losses)


def differences(
    experiment: str,
    meshes: Sequence[Sequence[int]],
    num_steps: int,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, float]:
    """Returns the largest relative difference of each mesh's losses from those on one device.

    The keys are the names of the meshes, such as "1x4x2".
    """
    expected = first_losses(experiment, (1, 1, 1), num_steps, settings)
    by_mesh = {}
    for mesh in meshes:
        actual = first_losses(experiment, mesh, num_steps, settings)
        by_mesh["x".join(map(str, mesh))] = float(np.max(np.abs(actual / expected - 1)))
    return by_mesh


def environment() -> str:
    """Returns a table cell with the commit, the jax version and the machine."""
    git = ["git", "-C", str(DOCS.parent)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    # The results of earlier rows are changes too, so only changes outside of docs count.
    diff = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", ":!docs"])
    commit = (head.stdout.strip() or "unknown") + ("-dirty" if diff.returncode == 1 else "")
    device = jax.devices()[0]
    kind = f"{os.cpu_count()} cores" if device.platform == "cpu" else device.device_kind
    return f"{commit}, jax {importlib.metadata.version('jax')}, {platform.machine()}, {kind}"


def write_cells(row: Row, cells: Mapping[str, str]) -> None:
    """Replaces cells, keyed by column, in a row of docs/results.md."""
    path = DOCS / "results.md"
    lines = path.read_text(encoding="utf-8").splitlines()
    table = {
        i: [cell.strip() for cell in line.split("|")[1:-1]]
        for i, line in enumerate(lines)
        if line.startswith("|")
    }
    header = next(iter(table.values()))
    # The name is a link after the first measurement.
    index = next(i for i, texts in table.items() if row.name in texts[0].strip("[").split("]"))
    for column, text in cells.items():
        table[index][header.index(column)] = text
    lines[index] = f"| {' | '.join(table[index])} |"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def draw(row: Row, runs: Sequence[Run]) -> None:
    """Writes a plot of a row's curves, one per seed, to docs/results."""
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(5, 3), layout="constrained")
    axes = figure.subplots()
    for run in runs:
        axes.plot(run.x, run.values, color="C0", alpha=0.6)
    if row.wide is None:
        axes.axhspan(*row.accepted, color="C1", alpha=0.3, label=f"published: {row.published}")
        axes.legend()
    else:
        axes.set_xscale("log", base=2)
    axes.set(title=row.name, xlabel="learning rate" if row.wide else "step", ylabel=row.metric)
    (DOCS / "results").mkdir(exist_ok=True)
    figure.savefig(DOCS / "results" / f"{row.name}.svg", metadata={"Date": None})


def report_row(row: Row, args: argparse.Namespace, jobs: Path) -> None:
    """Measures a row with several seeds, and prints and writes the result."""
    shared = {} if args.steps is None else {"run.num_train_steps": args.steps}
    figures, runs = [], []
    for seed in range(args.seeds):
        settings = {**shared, "run.seed": seed, "datasets.train.seed": seed}
        figure, run = measure_row(row, jobs / row.name / str(seed), settings)
        print(f"  seed {seed}: {figure:.4f}", flush=True)
        figures.append(figure)
        runs.append(run)
    mean, spread = float(np.mean(figures)), float(np.ptp(figures) / 2)
    verdict = "reached" if row.accepted[0] <= mean <= row.accepted[1] else "missed"
    ours = (
        f"{mean:.4g} (1 seed)"
        if args.seeds == 1
        else f"{mean:.4g} ± {spread:.2g} ({args.seeds} seeds)"
    )
    print(f"{row.name}: published {row.published} ({row.source}); ours {ours}: {verdict}")
    if args.write:
        seconds = f"{np.mean([run.seconds for run in runs]):.0f}"
        today = f"{datetime.date.today():%Y-%m-%d}"
        cells = {"ours": f"{ours}: {verdict}", "seconds": seconds, "date": today}
        cells["row"] = f"[{row.name}](results/{row.name}.svg)"
        write_cells(row, {**cells, "commit, versions, machine": environment()})
        draw(row, runs)
    compared = []
    by_mesh = differences(row.experiment, args.meshes, SHORT) if args.meshes else {}
    for mesh, (name, difference) in zip(args.meshes, by_mesh.items(), strict=True):
        settings = {**shared, "mesh.ici_mesh_shape": mesh}
        figure, _ = measure_row(row, jobs / row.name / name, settings)
        compared.append(f"{name}: {difference:.1e}, {figure:.4g}")
        outcome = "equal" if difference <= LIMIT else "different"
        print(f"  {compared[-1]}: the first {SHORT} losses are {outcome}", flush=True)
    if args.write and compared:
        write_cells(row, {"meshes": "; ".join(compared)})


def main() -> None:
    """Measures a row or a group of rows, or lists all rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name", nargs="?", help="a row or a group of rows, such as mnist1d")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, help="number of training steps, for a short trial")
    parser.add_argument("--jobs", type=Path, help="directory of the jobs; default: temporary")
    parser.add_argument("--write", action="store_true", help="update docs/results.md")
    parser.add_argument(
        "--meshes", nargs="*", default=[], type=lambda text: tuple(map(int, text.split(",")))
    )
    args = parser.parse_args()
    if args.write and args.steps is not None:
        parser.error("--write requires complete runs; omit --steps")
    rows = [row for row in ROWS if args.name in (row.name, row.name.partition(".")[0])]
    if not rows:
        for row in ROWS:
            print(f"{row.name:18} {row.published:10} {row.source}")
        return
    if args.meshes:
        simulate_devices(max(int(np.prod(mesh)) for mesh in args.meshes))
    with tempfile.TemporaryDirectory() as folder:
        for row in rows:
            report_row(row, args, args.jobs or Path(folder))


if __name__ == "__main__":
    main()
