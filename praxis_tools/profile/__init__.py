"""Time and memory of profiled steps by layer and collective, next to the plan's predictions.

Reads the files of a profile, and never runs a step.
"""
