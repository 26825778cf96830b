"""Weights that a new job takes from other checkpoints, and the rules that choose them.

Reads checkpoints of other jobs and of Orbax, and never writes one.
"""
