"""The host environment: memory, optional packages, files, and errors in the user's code.

This package uses the error classes from `core`, and does not depend on arrays.
"""
