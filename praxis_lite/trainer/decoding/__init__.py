"""Continues prompts, prints continuations as they come, and writes them to files."""
