"""Saves of the state in the memory of hosts, and restoring them on another mesh.

Uses the disk only to compare steps, and does not decide when a job saves.
"""
