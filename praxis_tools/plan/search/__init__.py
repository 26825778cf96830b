"""Searches for the fastest layout of an experiment on a topology.

Candidates are ranked by formulas; the best are compiled and planned. Never runs a step.
"""
