"""Initializes the state of a new job from other checkpoints, chosen by rules.

Reads checkpoints of other jobs and of Orbax; never writes checkpoints.
"""
