"""Determines the order of rows, by shuffling or by mixing several pipelines."""
