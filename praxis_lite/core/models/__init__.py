"""The model interface (init and apply over nested dicts of arrays), and its implementation for NNX.

This package knows nothing about devices, tasks or what a model computes.
"""
