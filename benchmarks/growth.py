"""Measures how CPU time grows with the amount of work; used by the benchmarks `growth_*.py`.

It prints the CPU seconds for doubling sizes, the cost ratio of the last doubling without the
constant part, and the exponent of the growth: 1.0 means linear, 2.0 means quadratic.
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
    """Prints the CPU seconds of `work(size)` for each size, and their growth.

    Args:
      name: Name of the measurement, printed on each line.
      sizes: Three or more sizes, each twice the previous size.
      work: Function that does the measured work once for a given size. If `work` returns a float,
        this value is used instead of the CPU seconds of the call. Prepare the inputs of `work`
        beforehand.
      repeats: Number of runs per size. The fastest run is used, because other load only adds time.

    Returns:
      Whether the cost ratio of the last doubling is at most `GOAL`.
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
    print(
        f"{name}: the last doubling costs {growth[-1]:.2f} times as much (goal {GOAL}); "
        f"exponent {exponent:.2f}"
    )
    return growth[-1] <= GOAL
