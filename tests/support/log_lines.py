"""Lines of a log in a pipe or a file, as a terminal shows them."""

from praxis_lite.job.processes.logs import message_of


def terminal_text(text: str) -> str:
    """Returns text without the time, level and process of each line that is from the log."""
    return "".join(map(_terminal_line, text.splitlines(keepends=True)))


def _terminal_line(line: str) -> str:
    prefix, found, rest = line.partition("] ")
    if found and prefix.startswith("[process "):
        return f"{prefix}{found}{message_of(rest)}"
    return message_of(line)
