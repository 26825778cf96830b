"""Experiments (WHAT runs), their reports of a run, and the names by which they are found.

Holds configs, and never sees an array. Public names are those of `praxis_lite` itself.
"""
