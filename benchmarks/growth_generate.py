"""Measures how the CPU time of `generate` grows with the number of calls that change settings.

`python benchmarks/growth_generate.py` trains a model for one step, and calls `generate` repeatedly
with the same changed settings. It prints the cost of these calls relative to calls with the default
settings.
"""

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import praxis_lite  # noqa: E402
from benchmarks import growth  # noqa: E402

SIZES = (20, 40, 80)
SETTINGS = (
    "mesh.ici_mesh_shape=1,1,1",
    "mesh.allow_unused_devices=True",
    "run.num_train_steps=1",
    "run.evaluation.every_steps=None",
    "task.decoder.max_decode_steps=4",
)


def main() -> int:
    """Returns the exit status: 1 if the total cost grows faster than the number of calls."""
    with tempfile.TemporaryDirectory() as folder:
        model = praxis_lite.train("lm.PyDocs", f"{folder}/job", settings=SETTINGS)
        calls = {
            "plain": {},
            # With greedy decoding, no row ends early in this model, so each call runs 4 steps.
            "changed": {"min_decode_steps": 3},
            "changed, with a list": {"stop_strings": ["none of these"]},
        }

        def generate(settings: dict, num_calls: int) -> None:
            for _ in range(num_calls):
                model.generate("The ", **settings)

        seconds, is_linear = {}, True
        for name, settings in calls.items():
            generate(settings, 1)
            is_linear &= growth.report(
                f"generate, {name}", SIZES, lambda size, given=settings: generate(given, size)
            )
            start = time.process_time()
            generate(settings, SIZES[-1])
            seconds[name] = (time.process_time() - start) / SIZES[-1]
    for name, each in seconds.items():
        print(
            f"a call of generate, {name}: {1e3 * each:.1f} ms of CPU, "
            f"{each / seconds['plain']:.2f} times a plain call"
        )
    return 0 if is_linear else 1


if __name__ == "__main__":
    sys.exit(main())
