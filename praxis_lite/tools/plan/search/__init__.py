"""What is the fastest way to lay an experiment out on a topology?

It compiles plans by way of the package around it, and never runs a step.
"""
