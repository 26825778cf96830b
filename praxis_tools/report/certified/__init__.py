"""Job certificates: documents with facts about a job that anyone can recompute and compare.

Facts are computed from the job's files and data. No steps are run, and no accelerator is needed.
"""
