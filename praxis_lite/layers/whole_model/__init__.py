"""What is set on a whole model's config or tree: sharding presets, adapters, quantized products.

Sees every layer; no layer sees it.
"""
