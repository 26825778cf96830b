"""The training loop, which runs steps, evaluates and saves weights, and reports metrics.

This package deals with steps, data, checkpoints and clocks, but not with mesh axes or layer maths.
"""
