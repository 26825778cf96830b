"""Planted defects that a check is to catch: `python -m tests.tools.testing.defects` plants all."""
