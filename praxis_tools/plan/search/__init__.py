"""Searches for the fastest layout of an experiment on a topology.

Candidates are ranked by formulas, and the best candidates are compiled and planned. No step is run.
"""
