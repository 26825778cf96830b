"""Which files a user's globs name."""

import glob
import os

from praxis_lite.errors import ConfigError, require


def matching_files(patterns: str, what: str = "TextCorpus") -> list[str]:
    """Returns the files that comma-separated globs (`**`, `~`) name, sorted, each once.

    Args:
        what: asks for them, for messages.

    Raises:
        ConfigError: a pattern names no file.
    """
    require(isinstance(patterns, str), f"{what}.files", patterns, "a text: globs between commas")
    wanted = [pattern.strip() for pattern in patterns.split(",") if pattern.strip()]
    if not wanted:
        raise ConfigError(
            f"{what}: files is {patterns!r}, which names no file. Give a path or a glob."
        )
    return sorted({path for pattern in wanted for path in _files_of(pattern, what)})


def _files_of(pattern: str, what: str) -> list[str]:
    expanded = os.path.expanduser(pattern)
    if os.path.isfile(expanded):  # A literal path may hold the characters of a glob.
        return [expanded]
    found = glob.glob(expanded, recursive=True)
    files = [path for path in found if os.path.isfile(path)]
    if files:
        return files
    if found:
        matched = f"only {'a directory' if len(found) == 1 else 'directories'}"
        change = f"Name the files in it, for instance {os.path.join(pattern, '**', '*.txt')!r}."
    else:
        matched, change = "nothing", "Correct the path or the glob."
    raise ConfigError(
        f"{what}: files names {pattern!r}, which matches {matched} (seen from {os.getcwd()}); "
        f"a file was wanted. {change}"
    )
