"""Changes to a complete model: sharding presets, adapters, quantization.

This package knows all layers; no layer knows it.
"""
