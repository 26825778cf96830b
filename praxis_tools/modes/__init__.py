"""Modes of the command line that praxis_tools adds, one per file.

A mode parses options, calls a tool with them, and prints or writes the tool's result.
"""
