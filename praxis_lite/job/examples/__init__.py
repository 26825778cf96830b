"""Verifies that a run used every example exactly once and in order.

While a job trains, each process records which rows it fed to the training steps. This package
compares the record with the data, which is read again. It does not depend on compiled steps, device
arrays or checkpoints.
"""
