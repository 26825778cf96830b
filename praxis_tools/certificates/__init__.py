"""Certifies steps of a running job (`run.certify_every_steps`).

To certify a step, the job re-runs it on reordered devices and on a different mesh, and compares the
results. The training state is never changed.
"""
