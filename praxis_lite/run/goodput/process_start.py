"""When this process began: before Python could look at a clock."""

import os
import time

# An older process did something else before: a shell that became this one, a notebook, tests.
_MOST_SECONDS = 60.0


def process_start() -> float:
    """Returns when the launch of this process began, in Unix seconds; called first of all.

    That is the start of the process as Linux tells it, to a hundredth of a second. If it is
    unknown, or more than a minute ago, it is now.
    """
    now = time.time()
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            # The name of the program, in brackets, may hold blanks and brackets.
            ticks = int(file.read().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):  # No Linux.
        return now
    return now - age if 0 <= age <= _MOST_SECONDS else now
