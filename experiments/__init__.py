"""Numbers: registered experiments over the tasks."""

if __name__ != "praxis_lite.experiments":  # A second copy of a class would be another class.
    raise ImportError("the library's experiments are imported as praxis_lite.experiments")
