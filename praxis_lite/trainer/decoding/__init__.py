"""Decodes prompts with a job's weights, streams the text to the terminal, and writes files."""
