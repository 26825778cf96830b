"""WHEN things happen: the loops over steps, evaluations and prompts, and what they report.

Knows steps, data, checkpoints and clocks, and never a mesh axis or what a layer computes.
"""
