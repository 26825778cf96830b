"""A trained model in Python: evaluation, prediction, generation, and display in notebooks.

Deals with jobs and their checkpoints; never trains.
"""
