"""Searches for the fastest layout of an experiment on a topology.

Formulas rank the candidates, and the best ones are compiled and planned. No step is run.
"""
