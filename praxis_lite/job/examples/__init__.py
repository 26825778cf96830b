"""Verifies that a run used every example exactly once and in order.

The record of the rows that each process fed is compared with the recomputed data. This package does
not depend on compiled steps, device arrays or checkpoints.
"""
