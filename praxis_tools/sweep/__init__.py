"""Runs sweeps: trains an experiment with many settings chosen by Optuna, a process per trial.

This package reads the files of jobs and launches `main.py --mode=train`; it never computes a step.
"""
