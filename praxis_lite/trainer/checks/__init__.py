"""Checks of a job before its first step compiles: settings, datasets, ids and memory.

They may trace a step but never run one.
"""
