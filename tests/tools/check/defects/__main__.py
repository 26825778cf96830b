"""Plants each defect, one after the other, and says which a check catches: `make check-defects`."""

import argparse
import os
import sys
import time
from pathlib import Path

from praxis_lite.core import simulate_devices

# How `Defect.missed` begins, in capitals.
MISSED = ("| NOT CAUGHT", "| AXIS ", "| LAYER ")


def _with_others(report: Path, rows: list[str]) -> list[str]:
    """Returns rows of a report: those given, and of other defects those that the file has."""
    from tests.tools.check.defects.families import FAMILIES

    lines = report.read_text("utf-8").splitlines() if report.exists() else []
    by_name = {line.split(" | ")[1]: line for line in (*lines, *rows) if line.startswith("| ")}
    names = [defect.name for defects in FAMILIES.values() for defect in defects]
    return [by_name[name] for name in names if name in by_name]


def main() -> int:
    """Returns 1 if a defect was not caught, or at another place than its own."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.check.defects")
    parser.add_argument("--report", type=Path, help="a Markdown file for the table")
    parser.add_argument("-k", default="", help="only defects with this in their name or family")
    args = parser.parse_args()
    # They are compiled, run once, and forgotten.
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_backend_optimization_level=0"
    simulate_devices(8)
    import jax

    from praxis_tools.explain.compiler_warnings import explained_warnings
    from tests.tools.check.defects.families import FAMILIES

    rows, num_missed, began = [], 0, time.monotonic()
    with explained_warnings(lambda warning: None):
        for family, defects in FAMILIES.items():
            for defect in defects:
                if args.k not in f"{family}: {defect.name}":
                    continue
                actual = defect.certificate().first_difference
                missed = defect.missed(actual)
                num_missed += bool(missed)
                message, layer, axis = (
                    ("", "", "")
                    if actual is None
                    else (f"{actual.what}, {actual.leaf}", actual.layer, actual.axis)
                )
                if missed:
                    message = f"{missed.upper()} {message}".rstrip()
                seconds = time.monotonic() - began
                print(f"[{seconds:5.0f} s] {defect.name}: {message}", flush=True)
                cells = (family, defect.name, message, layer or "-", axis or "-")
                rows.append(f"| {' | '.join(cells)} |")
                jax.clear_caches()
    seconds = time.monotonic() - began
    caught = f"{len(rows) - num_missed} of {len(rows)} defects caught"
    print(f"{caught}, {seconds:.0f} s")
    if args.report:
        rows = _with_others(args.report, rows)
        num_missed = sum(any(word in row for word in MISSED) for row in rows)
        caught = f"{len(rows) - num_missed} of {len(rows)} defects caught"
        title = [f"# Planted defects: {caught}", "", "Written by `make check-defects`.", ""]
        head = ["| family | defect | what differs first | layer | axis |", "|" + " --- |" * 5]
        args.report.write_text("\n".join([*title, *head, *rows]) + "\n", "utf-8")
    return int(num_missed > 0)


if __name__ == "__main__":
    sys.exit(main())
