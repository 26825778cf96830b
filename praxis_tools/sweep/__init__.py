"""Runs sweeps, which train an experiment with many settings chosen by Optuna.

Each trial is a `main.py --mode=train` process. This package only launches these processes and reads
their files; it never computes a step.
"""
