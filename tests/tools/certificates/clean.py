"""Certifies jobs without a fault, many times, and counts alarms; a launch goes on where one ended.

python -m tests.tools.certificates.clean FILE [--each=350] [--passes=3]
"""

import argparse
import collections
import json
import math
import random
import sys
import time
from pathlib import Path

from praxis_lite.core import simulate_devices

# Meshes of 8 devices by the number of axes; those that an experiment refuses are passed over.
_SHAPES = {
    1: [(8,), (4,), (6,)],
    2: [(2, 4), (8, 1), (4, 2), (1, 8), (3, 2)],
    3: [(1, 4, 2), (2, 2, 2), (1, 8, 1), (1, 1, 8), (1, 2, 4), (1, 7, 1), (1, 3, 2)],
    4: [(1, 2, 2, 2), (2, 2, 1, 2), (1, 4, 1, 2), (1, 2, 1, 4)],
}


# Those that compile quickly come first.
_FIRST = (
    "classify",
    "nnx_guide",
    "functions",
    "explicit.Digits",
    "lm.Synthetic",
    "pipelined.Synthetic",
    "moe.Synthetic",
    "vision",
    "seq2seq",
    "linen.Digits",
)


def certify(name: str, shape: tuple[int, ...], number: int, seed: int, file: Path) -> None:
    """Makes certificates of an experiment on a mesh; a step and other rows for each few."""
    import jax

    from tests.tools.certificates.planted import Job

    job = Job(name, shape, seed=seed)
    certifier = job.certifier()
    with file.open("a") as lines:
        for index in range(number):
            if index % 4 == 0:
                job.train()
            began = time.monotonic()
            made = certifier.certify(job.state, job.batch, job.key, 1000 * job.step + index)
            closest = max(made.comparisons, key=lambda x: x.share)
            print(
                json.dumps(
                    {
                        "experiment": name,
                        "mesh": shape,
                        "other": certifier.reruns[-1].name,
                        "step": job.step,
                        "alarm": str(made.failed[0]) if made.failed else "",
                        "repeated": made.draw > 0,
                        "share": closest.share,
                        "leaf": closest.leaf,
                        "exact": certifier.is_exact,
                        "rounding": certifier.reruns[0].rounding,
                        "seconds": time.monotonic() - began,
                    }
                ),
                file=lines,
                flush=True,
            )
    certifier.close()
    jax.clear_caches()


def summary(file: Path) -> str:
    """Returns how many certificates there are, of how many experiments, and the alarms."""
    lines = [json.loads(x) for x in file.read_text().splitlines()] if file.exists() else []
    lines = [x for x in lines if "alarm" in x]
    alarms = [x for x in lines if x["alarm"]]
    repeated = sum(x["repeated"] for x in lines)
    experiments = len({x["experiment"] for x in lines})
    closest = max((x["share"] for x in lines if not x["repeated"]), default=0.0)
    return (
        f"{len(lines):,} clean certificates of {experiments} experiments: {len(alarms)} alarms, "
        f"{repeated} made on other rows too, nearest to a tolerance {closest:.3f}"
    )


def main() -> int:
    """Returns 1 if there was an alarm."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.certificates.clean")
    parser.add_argument("file", type=Path, help="of certificates as JSON lines; it is gone on with")
    parser.add_argument("--each", type=int, default=350)
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("-k", default="", help="only experiments with this in their name")
    args = parser.parse_args()
    simulate_devices(8)
    from praxis_lite.core.errors import ConfigError
    from praxis_lite.experiment.registry import get_experiment, list_experiments
    from praxis_tools.explain.compiler_warnings import explained_warnings

    def place(name: str) -> int:
        return next((i for i, some in enumerate(_FIRST) if some in name), len(_FIRST))

    names = sorted((name for name in list_experiments() if args.k in name), key=place)
    done = collections.Counter()
    if args.file.exists():
        for text in args.file.read_text().splitlines():
            line = json.loads(text)
            done[line["experiment"]] += 1
    for turn in range(args.passes):
        for name in names:
            shapes = _SHAPES[len(get_experiment(name)().config().mesh.axis_names)]
            shapes = [x for x in shapes if math.prod(x) <= 8]
            missing = (turn + 1) * args.each - done[name]
            if missing <= 0:
                continue
            for shape in random.Random(f"{name}/{turn}").sample(shapes, len(shapes)):
                print(f"{name} on {shape}", flush=True)
                try:
                    with explained_warnings(lambda warning: None):
                        # Another seed than before: a launch that goes on makes others.
                        certify(name, shape, missing, 10_000 * turn + done[name], args.file)
                    break
                except ConfigError as error:
                    print(f"  refused: {str(error)[:200]}", flush=True)
                except Exception as error:
                    print(f"  left out: {type(error).__name__}: {str(error)[:200]}", flush=True)
                    break
            print(summary(args.file), flush=True)
    return int(" 0 alarms" not in summary(args.file))


if __name__ == "__main__":
    sys.exit(main())
