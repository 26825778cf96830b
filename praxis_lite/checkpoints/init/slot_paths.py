"""Paths of optimizer slots, and the weights that they belong to."""

from collections.abc import Sequence


def group_of(path: str) -> str:
    """Returns "opt_states/slots/GROUP" of a slot's path: the group that its optimizer updates."""
    return "/".join(path.split("/")[:3])


def around_the_weight(
    path: str, weights: set[str]
) -> tuple[Sequence[str], str | None, Sequence[str]]:
    """Returns the names before, the path of the weight that a slot's path has in it, and after."""
    names = path.split("/")
    for length in range(len(names), 0, -1):
        for start in range(len(names) - length + 1):
            part = "/".join(names[start : start + length])
            if part in weights:
                return names[:start], part, names[start + length :]
    return names, None, ()
