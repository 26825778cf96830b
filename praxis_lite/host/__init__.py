"""The environment of the library: host memory, optional packages, files, the user's code.

Knows the core's errors, and no arrays.
"""
