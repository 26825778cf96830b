"""WHERE a task is computed: its layout on a mesh, and compiled init, train, eval and decode steps.

Knows shapes, specs and jit, and never what a layer computes.
"""
