"""Decides the order of rows: shuffling, and mixtures of several pipelines."""
