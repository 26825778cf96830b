"""Saves, verifies and restores the states of a job, and initializes states from checkpoints.

Import names from their modules: the settings that experiments use do not import Orbax.
"""
