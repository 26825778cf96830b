"""Runs the complete fault suite: `python -m tests.faults --report docs/faults_report.md`.

The suite takes about an hour on two idle cores. `--only kills` runs one part, and with
--report replaces only the section of this part, so the suite can be run in parts. The exit status
is 1 if any trial failed.
"""

import argparse
import os
import platform
import re
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from tests.faults import damage, kills, pairs, targets, ways_out, zoo
from tests.faults.outcome import Row, outcome_of, report_lines, tail
from tests.faults.zygote import Zygote

_TITLE = "# Results of the fault suite"


def main() -> int:
    """Runs the requested parts and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--report", type=Path, metavar="FILE", help="report to update")
    parser.add_argument("--num_kills", type=int, default=200)
    parser.add_argument("--num_flips", type=int, default=100)
    parser.add_argument("--num_files", type=int, default=10_000, help="damaged files, all readers")
    parser.add_argument("--num_faults", type=int, default=1000, help="faults of an object store")
    parser.add_argument("--readers", nargs="+", metavar="NAME", help="run only these readers")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    failed = False
    for name in args.only:
        start = time.monotonic()
        print(f"{name}:", flush=True)
        rows = PARTS[name](args)
        seconds = time.monotonic() - start
        for row in rows:
            print(f"  {row.line()}", flush=True)
            for failure in row.failures:
                print(f"    FAILED: {failure}", flush=True)
        failed |= any(row.failures for row in rows)
        if args.report:
            _bring_up_to_date(args.report, name, rows, seconds, args.seed)
    return int(failed)


def _kills(args: argparse.Namespace) -> list[Row]:
    with Zygote() as zygote:
        job = zoo.home() / "whole"
        launch = zygote.launch(zoo.train_argv(job))
        assert launch.code == 0, tail(launch)
        return kills.run(zygote, outcome_of(job), args.num_kills, args.seed, _say)


def _damage(args: argparse.Namespace) -> list[Row]:
    with Zygote() as zygote:
        jobs = damage.Damage(zygote)

        def flips(step_dir: Path, other: Path):
            return damage.flips(step_dir, args.num_flips, args.seed)

        return [
            jobs.files(Row("single bits flipped in every file of a checkpoint"), flips, _say),
            jobs.files(
                Row("each file truncated, emptied, deleted or swapped"), damage.broken_files, _say
            ),
            jobs.folders(Row("stray and partially deleted folders")),
        ]


def _ways_out(args: argparse.Namespace) -> list[Row]:
    with Zygote() as zygote:
        whole = damage.Damage(zygote).whole
        rows = ways_out.leave(zygote, whole, list(ways_out.WAYS_OUT))
        if ways_out.can_mount():
            return rows + ways_out.fill(zygote, whole)
        return [*rows, Row("full disk: skipped, because mounting a disk requires root")]


def _targets(args: argparse.Namespace) -> list[Row]:
    with Zygote() as zygote:
        return [targets.run(zygote, damage.Damage(zygote).job, targets.TARGETS)]


def _meshes(args: argparse.Namespace) -> list[Row]:
    os.environ["JAX_PLATFORMS"] = "cpu"
    from praxis_lite.core import simulate_devices

    simulate_devices(8)
    from tests.faults import meshes

    return meshes.run()


def _stores(args: argparse.Namespace) -> list[Row]:
    os.environ["JAX_PLATFORMS"] = "cpu"
    from praxis_lite.core import simulate_devices

    simulate_devices(8)
    from tests.faults import store_jobs

    rows = []
    for scheme in ("s3", "gs"):
        rows += store_jobs.run(scheme, args.num_faults // 2, args.num_kills // 20, args.seed, _say)
    return rows


def _readers(args: argparse.Namespace) -> list[Row]:
    os.environ["JAX_PLATFORMS"] = "cpu"
    # A forked child would lack the threads that OpenBLAS started.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    from tests.faults import readers
    from tests.faults.reader_list import READERS

    zoo.home()  # Create it here, because the child processes exit without removing it.
    return readers.run(list(readers.named(READERS, args.readers)), args.num_files, args.seed, _say)


PARTS: dict[str, Callable[[argparse.Namespace], list[Row]]] = {
    "kills": _kills,
    "damage": _damage,
    "exits during a save": _ways_out,
    "mismatched settings": _targets,
    "meshes": _meshes,
    "two processes": lambda args: pairs.run(_say),
    "object stores": _stores,
    "file readers": _readers,
}


def _say(line: str) -> None:
    print(line, flush=True)


def _bring_up_to_date(report: Path, name: str, rows: list[Row], seconds: float, seed: int) -> None:
    """Replaces or adds a part's section in the report. Other sections do not change."""
    text = report.read_text(encoding="utf-8") if report.exists() else ""
    sections = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", text, flags=re.S | re.M))
    title = name.capitalize()
    stack = ", ".join(f"{item} {version(item)}" for item in ("jax", "orbax-checkpoint"))
    when = time.strftime("%Y-%m-%d")
    _, *body = report_lines(title, rows)
    sections[title] = "\n".join(
        [
            "",
            f"{when}, seed {seed}, {seconds / 60:.0f} min, Python {platform.python_version()}, "
            f"{stack}.",
            *body,
            "",
        ]
    )
    lines = [
        _TITLE,
        "",
        "Written by `python -m tests.faults --report docs/faults_report.md` (`make faults`). The",
        "tables list, for each fault, the number of trials and the number of trials that passed. A",
        "damaged file passes if it is read, or rejected with a clear error.",
        "",
    ]
    order = [part.capitalize() for part in PARTS]
    ranked = sorted(sections, key=lambda one: order.index(one) if one in order else len(order))
    for title in ranked:
        lines += [f"## {title}", sections[title].rstrip() + "\n"]
    report.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
