"""Compares the time and memory of profiled steps with the plan, by layer and collective.

Only the files of a profile are read; no step is run.
"""
