"""Trained models for other programs, as files that need only jax.

    python -m praxis_tools.export JOB OUT --what=decode|predict

It does not depend on training: it takes weights and a compiled step's function.
"""
