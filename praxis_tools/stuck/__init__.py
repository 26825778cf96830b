"""Finds job processes that are alive but stuck, and where other processes wait for them.

The decision is a pure function of the progress reported by the processes. It does not read clocks,
files or the state of processes.
"""
