"""Finds the layer and line that made a NaN or an infinity (run.debug_nans).

`reports` explains a training step, `origins` searches any jaxpr, `tags` evaluates one with a tag
for each array.
"""
