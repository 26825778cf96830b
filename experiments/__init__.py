"""Numbers: registered experiments over the tasks."""

if __name__ == "experiments":
    # Imported from a checkout by its folder's name; its classes would then be there twice.
    raise ImportError(
        "praxis_lite's own experiments are praxis_lite.experiments: import them by that name. If "
        "you mean a package of your own, it is not on sys.path, or has no __init__.py.",
        name=__name__,
    )
