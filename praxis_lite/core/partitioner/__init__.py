"""A task's layout on a mesh, and its compiled init, train, eval and decode steps.

This package knows shapes, specs and jit, but not what a layer computes.
"""
