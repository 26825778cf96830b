"""Which steps a job's folder has: named, verified, committed, kept or deleted.

Never sees the arrays in them.
"""
