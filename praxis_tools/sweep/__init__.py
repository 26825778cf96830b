"""Sweeps: trains an experiment with many settings, which Optuna chooses, a process per trial.

Reads the files of jobs and launches `main.py --mode=train`; never computes a step.
"""
