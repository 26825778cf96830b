"""Weights that a new job takes from other checkpoints, and the rules that choose them.

Reads foreign steps, and never writes one.
"""
