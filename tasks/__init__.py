"""WHAT is learned: tasks over the library's models."""
