"""Prompts in, continuations out: on the terminal as they come, and in files."""
