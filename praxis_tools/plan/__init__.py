"""Predicts a step's memory and time on a pod, without the pod's devices.

Predictions are derived from layouts and compiled programs. Steps are only run with --measure.
"""
