"""Recognizes out-of-memory exceptions and explains them to the user."""

import errno
import re
from collections.abc import Iterator

from praxis_lite.core.errors import OutOfMemory, shortened

# Messages from XLA, TensorStore, C++ and Python. gRPC errors about large messages are excluded.
_NO_MEMORY = re.compile(
    r"RESOURCE_EXHAUSTED(?!.*larger than max)|\bbad_alloc\b|can't start new thread"
)


def lack_of_memory(error: BaseException) -> str | None:
    """Returns the message of an out-of-memory error among an exception's causes, or None."""
    for cause in causes(error):
        text, name = str(cause), type(cause).__name__
        if (
            isinstance(cause, MemoryError)
            or (isinstance(cause, OSError) and cause.errno == errno.ENOMEM)
            or name == "ResourceExhaustedError"  # From TensorFlow, which may not be installed.
            or (name == "JaxRuntimeError" and "out of memory" in text.lower())
            or _NO_MEMORY.search(text)
        ):
            first = text.strip().partition("\n")[0].removeprefix("RESOURCE_EXHAUSTED: ")
            return shortened(first.rstrip(".") or name, 300)
    return None


def out_of_memory(lacking: str) -> OutOfMemory:
    """Returns the error for a process that ran out of memory."""
    return OutOfMemory(
        f"The process ran out of memory: {lacking}. Reduce batch_size, the sequence length, the "
        "model size or num_workers, stop other programs on this machine, or use a machine with "
        "more memory. Also check the limits of the container and the shell (ulimit -v)."
    )


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yields an exception and the chain of its causes."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__
