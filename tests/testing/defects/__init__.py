"""Planted defects, which a check is to catch: `python -m tests.testing.defects` plants them all."""
