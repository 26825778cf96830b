"""Verifies that a run used every example exactly once and in order.

Compares the record of the rows that each process fed with the recomputed data. Never deals with
steps, device arrays or checkpoints.
"""
