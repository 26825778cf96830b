"""Predicts without the devices whether a step fits on a pod and how long it takes.

Reads layouts and compiled programs; only --measure runs a step.
"""
