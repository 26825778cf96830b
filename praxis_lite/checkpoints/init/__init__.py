"""Initializes the state of a new job from other checkpoints, selected by rules.

This package reads checkpoints of other jobs and of Orbax, but never writes checkpoints.
"""
