"""Finds the layer and source line that produced a NaN or an infinity (run.debug_nans).

The module `reports` explains a training step, `origins` searches any jaxpr, and `tags` evaluates a
jaxpr with a tag for each array.
"""
