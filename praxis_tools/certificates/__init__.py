"""Certifies steps of a running job (`run.certify_every_steps`).

A certificate re-runs a step on reordered devices and on a different mesh, and compares the results.
It never changes the training state.
"""
