"""Compares jobs as text and on an HTML page with curves (`praxis report`).

Reports are built from the files in the job directories, even while the jobs are training.
"""
