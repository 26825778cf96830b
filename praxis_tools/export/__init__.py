"""Exports trained models as files that can be run with only jax installed.

    python -m praxis_tools.export JOB OUT --what=decode|predict

The package exports a partitioner's program and its weights; it never imports the training loop.
"""
