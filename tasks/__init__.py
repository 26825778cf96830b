"""Tasks for the library's models: losses, metrics and decoding."""

# A module imported under two names would define each class twice.
if __name__ != "praxis_lite.tasks":
    raise ImportError("import the library's tasks as praxis_lite.tasks")
