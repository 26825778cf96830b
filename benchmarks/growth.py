"""Measures how CPU time grows with the amount of work, for the benchmarks `growth_*.py`.

Prints CPU seconds at sizes that double, the ratio of the last doubling without the constant part,
and the exponent: 1.0 is linear, 2.0 quadratic.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence

GOAL = 2.1  # Largest acceptable cost ratio for twice the work.


def report(
    name: str, sizes: Sequence[int], work: Callable[[int], object], *, repeats: int = 3
) -> bool:
    """Prints the CPU seconds of `work(size)` at each size, and their growth.

    Args:
      name: Name of the measurement, printed on each line.
      sizes: Three or more sizes, each twice the one before.
      work: Does the measured work once, for a given size. Prepare its inputs beforehand. A float
        that it returns counts in place of the CPU seconds of the call.
      repeats: Runs per size; the fastest counts, because other load only adds time.

    Returns:
      Whether the last doubling costs at most `GOAL` times as much.
    """
    seconds = []
    for size in sizes:
        runs = []
        for _ in range(repeats):
            start = time.process_time()
            measured = work(size)
            spent = time.process_time() - start
            runs.append(measured if isinstance(measured, float) else spent)
        seconds.append(min(runs))
        print(f"{name}: {size:>9,}  {seconds[-1]:9.4f} s", flush=True)
    # The constant part is the intercept of the line through the two smallest sizes.
    constant = max(0.0, 2 * seconds[0] - seconds[1])
    noise = max(1e-6, 0.05 * constant)  # A cost that does not grow has a ratio of 1.
    growth = [
        max(after - constant, noise) / max(before - constant, noise)
        for before, after in itertools.pairwise(seconds)
    ]
    exponent = statistics.median(math.log2(ratio) for ratio in growth)
    print(f"{name}: the last doubling costs {growth[-1]:.2f} times as much (goal {GOAL}); "
          f"exponent {exponent:.2f}")
    return growth[-1] <= GOAL
