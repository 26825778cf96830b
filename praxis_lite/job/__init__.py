"""The directory, lock, processes and signals of a job.

This package does not depend on models, weights or data.
"""
