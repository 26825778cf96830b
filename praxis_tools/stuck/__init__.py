"""Which process of a job hangs, though it lives, and what do the others wait for?

The decision is a function of what all processes tell of themselves; it never sees a process, a
clock or a file.
"""

from praxis_tools.stuck.decision import Decision, Stuck
from praxis_tools.stuck.progress import Progress

__all__ = ["Decision", "Progress", "Stuck"]
