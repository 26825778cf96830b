"""What is set on a whole model from outside: splits by one word, adapters, quantized products?

Sees every layer; no layer sees it.
"""
