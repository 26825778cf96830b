"""Command-line modes added by praxis_tools, one per file.

A mode parses options, calls a tool and prints or writes the tool's result.
"""
