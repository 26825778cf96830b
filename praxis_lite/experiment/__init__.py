"""Experiments, the registry of their names, and configs of recorded jobs.

This package deals with configs and not with arrays. `praxis_lite` exports its public names.
"""
