"""Job certificates: documents with facts about a job that anyone can recompute and compare.

Facts are computed from the job's files and data. This runs no steps and needs no accelerator.
"""
