"""Certificates of jobs: a document of facts that others can recompute and compare.

Reads the files of a job and recomputes its data; never trains, and needs no accelerator.
"""
