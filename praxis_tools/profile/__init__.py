"""Compares the time and memory of profiled steps with the plan, by layer and collective.

This package only reads the files of a profile; it never runs a step.
"""
