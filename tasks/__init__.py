"""WHAT is learned: tasks over the library's models."""

if __name__ == "tasks":
    # Imported from a checkout by its folder's name; its classes would then be there twice.
    raise ImportError(
        "praxis_lite's own tasks are praxis_lite.tasks: import them by that name. If "
        "you mean a package of your own, it is not on sys.path, or has no __init__.py.",
        name=__name__,
    )
