"""Updates of weights: optimizers, groups of weights, schedules, slots, averages.

This package knows nothing about a model's layers, meshes or training loops.
"""
