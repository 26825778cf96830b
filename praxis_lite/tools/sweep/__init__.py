"""Which settings are best? Many jobs of an experiment, chosen by Optuna, each a process of its own.

Reads the files of jobs and launches `main.py --mode=train`; never computes a step.
"""
