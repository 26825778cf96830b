"""Transformations of complete models: sharding presets, adapters, quantization.

This package depends on all layers; no layer depends on it.
"""
