"""Runs steps on a mesh or a single device, in float64, with an entire batch or in parts.

Tolerances are in `praxis_tools.check.tolerances`.
"""
