"""Saves the train state in the memory of hosts, and restores it on any mesh.

When a job saves is decided in `praxis_tools.elastic.job_saves`.
"""
