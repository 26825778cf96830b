"""What does a compiled step hold and send on each device? Told as text, and drawn.

Reads layouts and compiled programs, and never runs one.
"""
