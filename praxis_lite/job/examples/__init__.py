"""Was every example of a run used exactly once, in order, whoever fed it?

Knows the lines that each process wrote of the rows that it fed, and the data made again; never
sees a step, an array on a device or a checkpoint.
"""
