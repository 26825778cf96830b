"""Planted defects that a check is to catch: `python -m tests.tools.check.defects` plants all."""
