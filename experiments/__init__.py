"""Registered experiments: models, data, hyperparameters and meshes for the library's tasks."""

# A module imported under two names would define each class twice.
if __name__ != "praxis_lite.experiments":
    raise ImportError("import the library's experiments as praxis_lite.experiments")
