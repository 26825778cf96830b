"""Schedules and ticks of pipelines, forward and backward.

The layer `Pipeline` is in `stacking/pipelines.py`. Only `one_forward_one_backward.py`, which
computes the gradients of a step, depends on models and tasks.
"""
