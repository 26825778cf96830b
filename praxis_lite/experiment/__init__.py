"""Experiments: configs of what to run, the registry of their names, and configs of recorded jobs.

Deals with configs and never with arrays. The public names are exported by `praxis_lite`.
"""
