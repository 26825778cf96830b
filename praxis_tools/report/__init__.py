"""Compares jobs, as text and as an HTML page with curves (`--mode=report`).

Reports are built from the files in the jobs' directories, also while they train.
"""
