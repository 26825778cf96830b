"""`getattr(tracer, "sharding", None)` costs more the longer the program is.

Prints how many lines of Python it takes early and late in a program: expected (the same), actual.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np


def lines_of_asking(x):
    """Returns how many lines of Python it takes to ask for a sharding."""
    lines = [0]

    def count(frame, event, arg):
        lines[0] += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        getattr(x, "sharding", None)
    finally:
        sys.settrace(before)
    return lines[0]


def results(jit=jax.jit):
    """Returns the numbers of lines after 10 and after 1,000 operations: expected, and counted."""
    lines = []

    @jit
    def program(x):
        for _ in range(2):  # The first finds all modules imported for the second.
            lines.clear()
            for num_operations in (10, 1000):
                for _ in range(num_operations):
                    x = jnp.sin(x)
                lines.append(lines_of_asking(x))
        return x

    program(np.float32(1))
    return np.array([lines[0]] * 2), np.array(lines)


if __name__ == "__main__":
    print(f"jax {jax.__version__}: expected, actual", *results(), sep="\n")
