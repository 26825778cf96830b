"""Where a NaN or an infinity was made: run.debug_nans.

`steps` says it of a training step, `origins` of any jaxpr; `tags` runs one with a tag on each
array, and `jaxprs` reads them alike from jax 0.10 to 0.12.
"""
