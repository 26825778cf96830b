"""What a compiled step does: its memory, its collectives, its layers, in text and drawn.

Reads layouts and compiled programs, and never runs one.
"""
