"""Subcommands that work on files instead of an experiment's job, such as `praxis checkpoints`.

Programs only pass their options to functions in other packages.
"""
