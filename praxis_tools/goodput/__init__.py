"""Goodput: where the time of a job went, with a kind for each second in and between launches.

Reads clocks and a file in the job's directory, and never an array.
"""
