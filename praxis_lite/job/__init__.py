"""A job as the operating system sees it: its directory, lock, processes and signals.

Never deals with a model, its weights or its data.
"""
