"""Writes the files of a training job immediately; used as the trial of a sweep in tests.

The loss is a parabola of the logarithm of the learning rate, with its minimum at 0.01, and is the
same at each evaluation. Some learning rates cause faults: 512 is refused, 256 fails, 128 has a NaN,
64 waits at step 10 until it is stopped, and 32 damages its evaluation file. A repeated run resumes
after the lines that it has already written.
"""

import json
import math
import os
import signal
import sys
import time
from pathlib import Path

STEPS, EVERY = 20, 5


def main(argv):
    settings = dict(item.split("=", 1) for item in argv if "=" in item)
    folder, rate = Path(settings["--job_log_dir"]), float(settings["task.learner.learning_rate"])
    if rate == 512:
        print("error: The training state does\nnot fit.")
        return 2
    folder.mkdir(exist_ok=True)
    (folder / "pid").write_text(str(os.getpid()))
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    metrics = folder / "metrics.jsonl"
    first = len(metrics.read_text().splitlines()) if metrics.exists() else 0
    loss = math.nan if rate == 128 else 1 + (math.log10(rate) + 2) ** 2
    for step in range(first + 1, STEPS + 1):
        line = {"step": step, "loss": loss}
        append(metrics, line)
        if step % EVERY == 0:
            append(folder / "eval_metrics.jsonl", {**line, "dataset": "heldout"})
        if rate == 32 and step == 7:
            with (folder / "eval_metrics.jsonl").open("a") as file:
                file.write("nonsense\n")
        if rate == 256 and step == 7:
            print("error: the plug was pulled")
            return 1
        deadline = time.monotonic() + 60
        while rate == 64 and step == 10 and not asked and time.monotonic() < deadline:
            time.sleep(0.01)
        if asked:
            print(f"stopped by SIGTERM: step {step} is saved")
            return 0
    print(f"trained to step {STEPS}")
    return 0


def append(path, line):
    text = json.dumps({k: "NaN" if v != v else v for k, v in line.items()})
    with path.open("a") as file:
        file.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
