"""WHAT surrounds the library: memory for simulated devices, installed packages, the user's code.

Knows errors of the core, and no array.
"""
