"""Goodput: where the time of a job went, with a kind for each second in and between launches."""
