"""Where arrays are placed: meshes, split-dims mappings, rules, padding, batches.

This package knows nothing about layers, models or steps.
"""
