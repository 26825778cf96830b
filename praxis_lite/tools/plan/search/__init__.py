"""Which layout of an experiment on a topology is the fastest?

It compiles plans by way of the package around it, and never runs a step.
"""
