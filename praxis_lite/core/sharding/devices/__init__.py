"""Devices: their order in a mesh, mesh axis types, and compiler options.

This package does not depend on layers.
"""
