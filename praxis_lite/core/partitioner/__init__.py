"""The layout of a task's state on a mesh, and its compiled init, train, eval and decode steps.

This package handles shapes, specs and compilation; it does not depend on what a layer computes.
"""
