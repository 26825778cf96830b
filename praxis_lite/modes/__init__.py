"""What does a command line do with an experiment or a job? A mode per file, and the options.

Turns options into arguments, and never computes.
"""
