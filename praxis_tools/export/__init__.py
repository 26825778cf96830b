"""Trained models for other programs: over HTTP, or as files that need only jax.

    python -m praxis_tools.export.export JOB OUT --what=decode|predict
    python -m praxis_lite.main --mode=serve --job_log_dir=JOB

It knows nothing of training: it takes weights and a compiled step's function.
"""
