"""The host environment: memory, optional packages, files, and errors in the user's code.

Uses the core's errors; never deals with arrays.
"""
