"""Settings of a whole model from outside: splits by a word, adapters, quantized products.

Sees every layer; no layer sees it.
"""
