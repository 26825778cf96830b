"""Runs sweeps, which train an experiment many times with settings chosen by Optuna.

Each trial is a `praxis train` process. This package only launches these processes and reads
their files; it never runs a training step.
"""
