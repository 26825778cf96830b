"""The training loop, which runs, evaluates, saves and reports steps.

This package deals with steps, data, checkpoints and clocks, but not with mesh axes or the maths of
layers.
"""
