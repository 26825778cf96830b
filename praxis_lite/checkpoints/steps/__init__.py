"""Step folders of checkpoints: naming, verification, commits, retention and deletion.

This package does not read the arrays in the folders.
"""
