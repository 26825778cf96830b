"""The tools of the command line, a mode per file.

Turns options into arguments of the tools, and never computes.
"""
