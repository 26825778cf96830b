"""Assertions for tests of your models: limits on collectives, and layers on a mesh."""
