"""Devices: their order and axis types in a mesh, and the options of their compilers.

This package knows nothing about layers.
"""
