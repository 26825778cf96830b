"""Exports trained models as files that other programs run with only jax installed.

    python -m praxis_tools.export JOB OUT --what=decode|predict

The package takes a partitioner and its weights, and never imports the training loop.
"""
