"""The model interface (init and apply over nested dicts of arrays), and its NNX implementation.

This package does not depend on devices, tasks or what a model computes.
"""
