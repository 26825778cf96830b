"""Can a job run as it is set? Asked before anything compiles: settings, ids, memory.

Never runs a step.
"""
