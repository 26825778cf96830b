"""States on disk: saved, compared and restored, the best kept, and the weights a new job takes.

Names are imported from their modules: what experiments need of them does not load Orbax.
"""
