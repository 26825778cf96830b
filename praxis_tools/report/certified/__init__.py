"""Certificates of jobs: documents with facts that anyone can recompute and compare.

Facts are computed from the files of a job and from its data. No step is trained, and no accelerator
is needed.
"""
