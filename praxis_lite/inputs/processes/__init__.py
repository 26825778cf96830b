"""Runs pipelines in other processes: to prefetch or compare batches, and to read all examples.

Nothing here depends on the contents of a batch.
"""
