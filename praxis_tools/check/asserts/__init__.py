"""Assertions for your own tests: collectives within a budget, layers as on a single device."""
