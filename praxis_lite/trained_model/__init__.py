"""Evaluation, prediction and generation with trained models, and their display in notebooks.

This package reads jobs and their checkpoints, but does not train.
"""
