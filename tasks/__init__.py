"""WHAT is learned: tasks over the library's models."""

if __name__ != "praxis_lite.tasks":  # A second copy of a class would be another class.
    raise ImportError("the library's tasks are imported as praxis_lite.tasks")
