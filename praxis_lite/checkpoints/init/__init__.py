"""Initializes the state of a new job from other checkpoints, selected by rules.

This package reads checkpoints from other jobs and from Orbax, but never writes checkpoints.
"""
