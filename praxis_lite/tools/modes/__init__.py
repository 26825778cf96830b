"""Which tools does the command line offer? A mode per file.

Turns options into arguments of the tools, and never computes.
"""
