"""Job certificates: documents with facts about a job that anyone can recompute and compare.

Facts are computed from the job's files and data, without running a step and without an accelerator.
"""
