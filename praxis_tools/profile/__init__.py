"""Compares time and memory of profiled steps, by layer and collective, with the plan.

This package reads the files of a profile and never runs a step.
"""
