"""Finds the process of a job that is alive but stuck, and what the other processes wait for.

The decision is a function of the progress that all processes report; it never accesses a process,
a clock or a file.
"""

from praxis_tools.stuck.decision import Decision, Stuck
from praxis_tools.stuck.progress import Progress

__all__ = ["Decision", "Progress", "Stuck"]
