"""Placement of arrays on devices: meshes, split-dims mappings, rules, padding and batches.

This package does not depend on layers, models or steps.
"""
