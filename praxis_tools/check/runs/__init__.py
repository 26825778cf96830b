"""Runs steps in float64 on a mesh or a single device, with an entire batch or in parts.

See `praxis_tools.check.tolerances` for the tolerances.
"""
