"""Actions between training steps: the `Hook` base class, and the hooks that every job has.

The loop (`training_loop.py`) refers to no hook by name, and hooks do not refer to each other.
"""
