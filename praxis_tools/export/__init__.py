"""Exports trained models as files that can be run with only jax installed.

    praxis export JOB OUT --what=decode|predict

The package exports the program and weights of a partitioner, and never imports the training loop.
"""
