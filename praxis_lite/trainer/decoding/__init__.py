"""Decodes prompts with a job's weights, and prints the text or writes it to files."""
