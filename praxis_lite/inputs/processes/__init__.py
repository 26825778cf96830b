"""Runs pipelines in other processes, to prefetch or compare batches and to read all examples.

This package does not depend on the contents of batches.
"""
