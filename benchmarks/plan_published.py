"""Compares predicted step times with published step times, to measure the error of plans.

    pip install libtpu
    python benchmarks/plan_published.py --rows ../shared/published/steps.jsonl [--id ID ...]
    python benchmarks/plan_published.py --rows FILE --fit    # fits and prints the efficiencies

Each published run is rebuilt with our layers (benchmarks/published_runs.py) and compiled for its
TPUs, which takes one to seven minutes. Compiled steps are cached in --cache, so that an interrupted
run of this script can be resumed. The model families are divided into two halves: efficiencies are
fitted on one half and evaluated on the other. Runs that cannot be rebuilt are listed with the
reason.
"""

import argparse
import dataclasses
import gzip
import hashlib
import json
import re
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from published_runs import Run, batch_of, compiler_options, mesh_of, partitioner_of, why_not
from scipy.optimize import least_squares

from praxis_lite.host.text_table import table_lines
from praxis_lite.trainer.layout_table import layout_warnings
from praxis_tools.explain import hlo
from praxis_tools.plan.costs import FITTED, Efficiencies
from praxis_tools.plan.memory import parse_out_of_memory
from praxis_tools.plan.predict import compile_with_text, predicted_fields
from praxis_tools.plan.topology import Topology, physical_mesh, topology_of

# Model families whose runs are used to fit the efficiencies; all other families are held out.
FITTED_FAMILIES = (
    "maxtext-22b",
    "maxtext-16b",
    "maxtext-64b",
    "maxtext-256b",
    "mixtral-8x7b",
    "honeycrisp-3b",
)
# Fitted efficiencies, each with a usual value and bounds.
_FREE = {
    "cycles": (1.0, 0.8, 1.1),
    "kernel": (0.5, 0.2, 0.75),
    "link": (0.9, 0.5, 1.11),
    "network": (0.8, 0.1, 3.0),
    "waiting": (0.02, 0.001, 0.1),
}


def compiled(run: Run, cache: Path) -> dict[str, Any]:
    """Compiles a run in a subprocess; returns `text` and `peak`, or `too_large`, or `failed`.

    Runs with the same step, such as runs with superseded results, are compiled only once.
    """
    kept, program = cache / f"{run['id']}.json", cache / f"{run['id']}.hlo.gz"
    if not kept.exists():
        start = time.monotonic()
        print(f"compiling {run['id']} for {run['slices']} x {run['topology']}", file=sys.stderr)
        record: dict[str, Any] = {}
        try:
            partitioner = partitioner_of(run, topology(run).devices)
            for warning in layout_warnings(partitioner.layout):
                print(f"WARNING: {run['id']}: {warning}", file=sys.stderr)
            lowered = partitioner.train_step.lower(batch_of(run))
            of = run["topology"], run["slices"], compiler_options(run), lowered.as_text()
            key = hashlib.sha256(repr(of).encode()).hexdigest()
            if same := same_program(cache, key):
                record = json.loads(same.read_text())
                if (text := same.with_suffix(".hlo.gz")).exists():
                    program.write_bytes(text.read_bytes())
            else:
                record = {"program": key} | compile_into(lowered, topology(run), program)
        except Exception as error:  # Continue with the other runs.
            record |= {"failed": str(error)[:300]}
        record["compile_seconds"] = time.monotonic() - start
        kept.write_text(json.dumps(record))
    record = json.loads(kept.read_text())
    if program.exists():
        record["text"] = gzip.decompress(program.read_bytes()).decode()
    return record


def same_program(cache: Path, key: str) -> Path | None:
    """Returns the record of a compiled run with the same step, or None."""
    records = (path for path in sorted(cache.glob("*.json")) if key in path.read_text())
    return next(records, None)


def compile_into(lowered: Any, on: Topology, program: Path) -> dict[str, Any]:
    """Compiles a step for `on`, writes its HLO text, and returns a record of it."""
    try:
        step = compile_with_text(lowered, on)
    except jax.errors.JaxRuntimeError as error:
        if (expected := parse_out_of_memory(error)) is None:
            raise
        return {"too_large": expected[1]}
    program.write_bytes(gzip.compress(step.as_text().encode(), 3))
    return {"peak": hlo.memory_per_device(step).peak}


def topology(run: Run) -> Topology:
    """Returns the device topology of a run."""
    return topology_of(run["topology"], run["slices"])


@dataclasses.dataclass
class Row:
    """A compiled run and its prediction."""

    run: Run
    record: dict[str, Any]
    devices: Topology
    plan: dict[str, Any] = dataclasses.field(default_factory=dict)
    planned_by: Efficiencies | None = None

    @property
    def published(self) -> float:
        return self.run["derived"]["step_seconds"]

    @property
    def is_fitted(self) -> bool:
        return self.run["model"]["name"] in FITTED_FAMILIES

    def predict(self, efficiencies: Efficiencies) -> float:
        """Returns the ratio of predicted to published step time, and stores the plan."""
        if self.planned_by != efficiencies:
            self.plan = predicted_fields(
                with_kernel_of(self.run, self.record["text"]),
                self.devices,
                self._mesh(),
                self.run["tokens_per_step"],
                efficiencies,
            )
            self.planned_by = efficiencies
        return self.plan["step_seconds"] / self.published

    def _mesh(self) -> Any:
        if not hasattr(self, "_made"):
            from praxis_lite.core import make_mesh

            mesh = make_mesh(mesh_of(self.run), self.devices.devices)
            self._made = physical_mesh(dict(mesh.shape), list(mesh.devices.flat), self.devices)
        return self._made


def with_kernel_of(run: Run, text: str) -> str:
    """Returns the HLO text with the run's number of matmuls in its attention kernels.

    A fused backward kernel, which computes dq together with dk and dv, needs five matmuls. JAX's
    splash kernel needs seven, because its dq kernel recomputes the logits and the gradient of the
    probabilities.
    """
    if "fused backward" not in run["attention"]["kernel"]:
        return text
    return re.sub(
        r'share_of_blocks="([\d.]+)"(?=[^\n]*splash_mha_dq)',
        lambda match: f'share_of_blocks="{float(match[1]) / 3:.6f}"',
        text,
    )


def fit(rows: Sequence[Row]) -> Efficiencies:
    """Returns the efficiencies that minimize the relative errors of `rows`."""
    names = list(_FREE)
    pulled_to, low, high = (np.log([_FREE[name][k] for name in names]) for k in range(3))
    start = np.clip(np.log([getattr(FITTED, name) for name in names]), low + 1e-3, high - 1e-3)

    def efficiencies(logs: np.ndarray) -> Efficiencies:
        values = map(float, np.exp(logs))
        return dataclasses.replace(FITTED, **dict(zip(names, values, strict=True)))

    def errors(logs: np.ndarray) -> np.ndarray:
        built = efficiencies(logs)
        misses = [np.log(row.predict(built)) for row in rows]
        # Regularize towards usual values, because the runs do not determine all parameters. In
        # cross-validation over families, the median error was 5.1%, 3.9% and 4.7% with weights of
        # 0.05, 0.15 and 0.4 (mean square 6.5%, 6.6% and 7.2%).
        return np.array([*misses, *(0.15 * (logs - pulled_to))])

    result = least_squares(
        errors, start, bounds=(low, high), loss="soft_l1", f_scale=0.1, diff_step=0.02, max_nfev=5
    )
    return efficiencies(result.x)


def spread(rows: Sequence[Row], efficiencies: Efficiencies) -> float:
    """Returns the 80th percentile of the relative errors."""
    misses = [abs(np.log(row.predict(efficiencies))) for row in rows]
    return float(np.expm1(np.quantile(misses, 0.8)))


COLUMNS = (
    "run",
    "set",
    "published seconds",
    "predicted seconds",
    "error",
    "peak GiB",
    "fits",
    "range",
)


def main() -> None:
    """Prints the table and the runs that are missing from it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", required=True, help="file with one published run per line")
    parser.add_argument("--id", nargs="+", help="only these runs")
    parser.add_argument("--cache", default="~/.cache/praxis_lite/published")
    parser.add_argument("--fit", action="store_true", help="fit the efficiencies")
    parser.add_argument(
        "--table",
        type=Path,
        help="write the table to this file, such as benchmarks/plan_published.tsv",
    )
    options = parser.parse_args()
    cache = Path(options.cache).expanduser()
    cache.mkdir(parents=True, exist_ok=True)
    rows, left_out = [], []
    with open(options.rows, encoding="utf-8") as file:
        runs = [json.loads(line) for line in file]
    for run in runs:
        if options.id and run["id"] not in options.id:
            continue
        reason = why_not(run)
        record = {} if reason else compiled(run, cache)
        if "text" in record:
            rows.append(Row(run, record, topology(run)))
        else:
            words = {"too_large": "does not fit: ", "failed": "does not compile: "}
            left_out.append(
                (
                    run["id"],
                    reason
                    or "".join(words[key] + value for key, value in record.items() if key in words),
                )
            )
    efficiencies = FITTED
    if options.fit:
        efficiencies = fit([row for row in rows if row.is_fitted])
        efficiencies = dataclasses.replace(efficiencies, spread=spread(rows, efficiencies))
        print(efficiencies)
    lines = [COLUMNS, *(cells(row, efficiencies) for row in rows)]
    if options.table:
        options.table.write_text("".join("\t".join(line) + "\n" for line in lines))
    print(*table_lines(lines, right=range(2, len(COLUMNS))), sep="\n")
    print_errors(rows, efficiencies)
    print("\nNot predicted:")
    for name, reason in left_out:
        print(f"  {name}: {reason}")


def cells(row: Row, efficiencies: Efficiencies) -> tuple[str, ...]:
    """Returns a run's line of the table."""
    error, peak = row.predict(efficiencies) - 1, row.record["peak"]
    return (
        row.run["id"],
        "fitted" if row.is_fitted else "held out",
        f"{row.published:.2f}",
        f"{row.plan['step_seconds']:.2f}",
        f"{error:.1%}",
        f"{peak / 2**30:.1f}",
        "yes" if peak <= row.devices.chip.hbm_bytes else "no",
        f"{row.plan['step_seconds_low']:.2f}-{row.plan['step_seconds_high']:.2f}",
    )


def print_errors(rows: Sequence[Row], efficiencies: Efficiencies) -> None:
    """Prints a summary of the errors in each half."""
    for name, halves in (("fitted on", (True,)), ("held out", (False,)), ("all", (True, False))):
        errors = [abs(r.predict(efficiencies) - 1) for r in rows if r.is_fitted in halves]
        if errors:
            near = sum(error <= 0.2 for error in errors) / len(errors)
            print(
                f"{name}: {len(errors)} runs, median error {statistics.median(errors):.1%}, "
                f"{near:.0%} within 20%"
            )


if __name__ == "__main__":
    main()
