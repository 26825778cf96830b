"""Saves the train state in host memory, and restores it on any mesh.

See `praxis_tools.elastic.job_saves` for when a job saves its state.
"""
