"""Runs to be compared: steps in float64, on a mesh or a single device, whole or in parts.

Never says how far two runs may differ.
"""
