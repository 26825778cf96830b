"""Formats tables as text."""

from collections.abc import Collection, Sequence

__all__ = ("table_lines", "unique_ends")


def table_lines(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Formats rows as lines with aligned columns.

    Args:
      rows: The cells of each row.
      right: Indices of right-aligned columns.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def unique_ends(names: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    """Returns the shortest suffix of each name that no other name ends with."""
    ends = []
    for name in names:
        candidates = (name[-size:] for size in range(1, len(name)))
        ends.append(
            next(
                (
                    end
                    for end in candidates
                    if sum(other[-len(end) :] == end for other in names) == 1
                ),
                name,
            )
        )
    return ends
