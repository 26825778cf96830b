"""Checks of a job before its first step is compiled: settings, datasets, ids and memory.

The checks may trace a step but never run one.
"""
