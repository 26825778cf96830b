"""Finds files by globs, and decodes and validates their text."""
