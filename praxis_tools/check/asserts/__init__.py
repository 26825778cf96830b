"""Assertions for tests of your models: budgets for collectives, and layers on a mesh."""
