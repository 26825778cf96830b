"""Assertions for tests of one's own: collectives within a budget, layers as on one device."""
