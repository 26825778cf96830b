"""WHAT does this machine have: memory for programs that simulate devices, installed packages.

Knows errors of the core, and no array.
"""
