"""Goodput accounting: classifies every second of a job, within launches and between them."""
