"""Finds a process of a job that is alive but stuck, and where the other processes wait for it.

The decision is a pure function of the progress that the processes report: it reads no clock, file
or process.
"""

from praxis_tools.stuck.decision import Decision, Stuck
from praxis_tools.stuck.progress import Progress

__all__ = ["Decision", "Progress", "Stuck"]
