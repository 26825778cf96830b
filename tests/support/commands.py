"""Runs commands in this process, and returns their exit status."""

from collections.abc import Callable

from praxis_lite.job.command import run


def praxis(*argv: object) -> int:
    """Runs `praxis` with these arguments."""
    from praxis_lite.main import main

    return _status(lambda: main([str(word) for word in argv]))


def status_of(command: Callable[[], int | None], *, continues_without_output: bool) -> int:
    """Calls `run` with a command."""
    return _status(lambda: run(command, continues_without_output=lambda: continues_without_output))


def _status(function: Callable[[], None]) -> int:
    try:
        function()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0
