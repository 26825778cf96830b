"""What differs in the configs of jobs."""

import itertools
from collections.abc import Mapping, Sequence

# One line of a config may hold a whole list of files.
_LONGEST = 300


def config_of(text: str) -> dict[str, str]:
    """Returns the values by path of a job's config.txt."""
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {path: value for path, _, value in pairs}


def config_differences(
    configs: Sequence[Mapping[str, str]],
) -> tuple[list[tuple[str, list[str | None]]], int]:
    """Returns the paths whose values differ, and how many are equal in all configs.

    Each path has a value per config, None where it does not have that path, in the order of the
    configs' lines. Long values are cut. An empty config is not compared: it is not known.
    """
    known = [bool(config) for config in configs]
    paths = list(dict.fromkeys(path for config in configs for path in config))
    values = {path: [config.get(path) for config in configs] for path in paths}
    differing = [
        (path, [_cut(value) for value in values[path]])
        for path in paths if len(set(itertools.compress(values[path], known))) > 1
    ]
    return differing, len(paths) - len(differing)


def _cut(value: str | None) -> str | None:
    return value if value is None or len(value) <= _LONGEST else f"{value[:_LONGEST]}..."
