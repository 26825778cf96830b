"""Predicts whether a step fits on a pod and how long it takes, without the pod's devices.

Predictions are derived from layouts and compiled programs. Steps are only run with --measure.
"""
