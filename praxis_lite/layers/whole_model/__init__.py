"""Transformations of complete models: sharding presets, adapters, quantization.

This package depends on all layers, and no layer depends on this package.
"""
