"""A job as the operating system sees it: its directory, its lock, its processes.

Never sees a model, a mesh or an array.
"""
