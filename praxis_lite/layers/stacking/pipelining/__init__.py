"""Schedules and tick loops of pipelines, for forward and backward passes.

The layer `Pipeline` is in `stacking/pipelines.py`. Only `one_forward_one_backward.py`, which
computes the gradients of a training step, depends on models and tasks.
"""
