"""Finds the layer and source line that produced a NaN or an infinity (run.debug_nans).

The module `reports` explains a training step. It uses `origins`, which finds the operation in any
jaxpr, and `tags`, which evaluates a jaxpr with a tag per array.
"""
