"""Recognizes exceptions about too little memory, and makes errors for commands of them."""

import errno
import re
from collections.abc import Iterator

from praxis_lite.core.errors import OutOfMemory, shown

# Messages of XLA, TensorStore, C++ and Python; not those of gRPC about too large a message.
_NO_MEMORY = re.compile(
    r"RESOURCE_EXHAUSTED(?!.*larger than max)|\bbad_alloc\b|can't start new thread"
)


def lack_of_memory(error: BaseException) -> str | None:
    """Returns a line on what an exception, or its cause, lacked memory for, or None."""
    for cause in causes(error):
        words, name = str(cause), type(cause).__name__
        if (
            isinstance(cause, MemoryError)
            or (isinstance(cause, OSError) and cause.errno == errno.ENOMEM)
            or name == "ResourceExhaustedError"  # TensorFlow's, which need not be imported.
            or (name == "JaxRuntimeError" and "out of memory" in words.lower())
            or _NO_MEMORY.search(words)
        ):
            first = words.strip().partition("\n")[0].removeprefix("RESOURCE_EXHAUSTED: ")
            return shown(first.rstrip(".") or name, 300)
    return None


def out_of_memory(lacking: str) -> OutOfMemory:
    """Returns the error of a command, or a process of it, that ran out of memory."""
    return OutOfMemory(
        f"The process ran out of memory: {lacking}. Make what is read or computed at once smaller "
        "(batch_size, longer rows, the model, num_workers), end what else runs here, or take a "
        "machine with more memory; a limit of the container or of the shell (ulimit -v) counts too."
    )


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yields an exception, then its cause, then the cause of that, and so on."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__
