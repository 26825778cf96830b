"""A job as the operating system sees it: its directory, its lock, its processes.

Never sees a model, its weights or its data.
"""
