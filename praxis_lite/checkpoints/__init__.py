"""Saves, verifies and restores the states of a job, and initializes states from checkpoints.

Import names from their modules, so that experiments can import settings without importing Orbax.
"""
