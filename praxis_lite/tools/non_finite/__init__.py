"""Which layer and which line made a NaN or an infinity? (run.debug_nans)

`reports` answers for a training step, `origins` for any jaxpr; `tags` runs one with a tag on each
array, and `jaxprs` reads them alike from jax 0.10 to 0.12. Never sees a checkpoint or the data.
"""
