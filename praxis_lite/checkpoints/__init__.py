"""States on disk: saved, compared and restored, the best kept, and what a new job takes from them.

Names are imported from their modules: what experiments need of them does not load Orbax.
"""
