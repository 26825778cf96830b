"""Reports: compares jobs, as text and as a page with curves.

Reads the files of their directories, also while they train, and never the weights.
"""
