"""Was every example of a run used exactly once, in order?

Compares the lines that each process wrote about the rows that it fed with the recomputed data.
Never sees a step, an array on a device or a checkpoint.
"""
