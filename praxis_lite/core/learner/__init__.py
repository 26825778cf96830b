"""Weight updates: optimizers, weight groups, schedules, slots and averages.

This package does not depend on layers, meshes or training loops.
"""
