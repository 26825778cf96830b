"""Plants each defect and reports which of them a check detects: `make check-defects`.

The results of defects that `-k` leaves out are those of an earlier run.
"""

import argparse
import os
import sys
import time
from pathlib import Path

from praxis_lite.core import simulate_devices
from tests.tools.check.defects.results import Result, page, read_results, write_results


def main() -> int:
    """Returns 1 if a defect was not detected, or at the wrong layer or axis."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.check.defects")
    parser.add_argument("--report", type=Path, help="a Markdown file for the summary")
    parser.add_argument("-k", default="", help="only defects with this in their name or kind")
    args = parser.parse_args()
    # Each program runs only once.
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_backend_optimization_level=0"
    simulate_devices(8)
    import jax

    from praxis_tools.explain.compiler_warnings import explained_warnings
    from tests.tools.check.defects.families import FAMILIES

    results, began = [], time.monotonic()
    with explained_warnings(lambda warning: None):
        for kind, defects in FAMILIES.items():
            for defect in defects:
                if args.k not in f"{kind}: {defect.name}":
                    continue
                first = defect.certificate().first_difference
                result = Result(
                    kind,
                    defect.name,
                    ", ".join(defect.parts),
                    comparison=first.kind if first else "",
                    leaf=first.leaf if first else "",
                    layer=first.layer if first else "",
                    axis=(first.axis or "") if first else "",
                    missed=defect.missed(first),
                    date=time.strftime("%Y-%m-%d"),
                )
                results.append(result)
                message = f"{result.missed.upper()} {result.comparison}, {result.leaf}".strip()
                seconds = time.monotonic() - began
                print(f"[{seconds:5.0f} s] {defect.name}: {message}", flush=True)
                jax.clear_caches()
    num_missed = sum(bool(result.missed) for result in results)
    detected = f"{len(results) - num_missed} of {len(results)} defects detected"
    print(f"{detected}, {time.monotonic() - began:.0f} s")
    if args.report:
        stored = read_results() | {result.defect: result for result in results}
        names = [defect.name for defects in FAMILIES.values() for defect in defects]
        results = [stored[name] for name in names if name in stored]
        write_results(results)
        args.report.write_text(page(results), "utf-8")
    return int(num_missed > 0)


if __name__ == "__main__":
    sys.exit(main())
