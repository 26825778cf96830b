"""Gradients into weights: optimizers, groups of weights, schedules, slots, averages.

Never sees a model's layers, a mesh or a loop.
"""
