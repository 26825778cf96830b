"""What a new job takes from other checkpoints: which weights, by which rules.

Reads foreign steps, and never writes one.
"""
