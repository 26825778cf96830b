"""Calls a function with many items in processes on all cores, and logs the progress."""

import concurrent.futures
import concurrent.futures.process
import contextlib
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from praxis_lite.core.errors import ConfigError

_WORTH_PROCESSES = 8_192  # Examples: a process starts in half a second.
_SECONDS_BETWEEN_LINES = 5.0


def on_all_cores(
    function: Callable[[Any], Any], items: Sequence[Any], sizes: Sequence[int], what: str
) -> None:
    """Calls a function with each item, for its effects.

    Little work is done here. Much work is done by a process per core, which end with this one; a
    line reports the progress every 5 s.

    Args:
      function: picklable, as are the items.
      sizes: number of examples in each item.

    Raises:
      ConfigError: a process ended by itself.
      What the function raises; work that was not begun is left.
    """
    progress = _Progress(what, sum(sizes))
    if sum(sizes) < _WORTH_PROCESSES:
        for item, size in zip(items, sizes, strict=True):
            function(item)
            progress.add(size)
        return
    with _pool(function, min(len(items), num_cores())) as pool:
        size_of = {pool.submit(_call, item): size for item, size in zip(items, sizes, strict=True)}
        waiting = set(size_of)
        while waiting:
            ended, waiting = concurrent.futures.wait(
                waiting, _SECONDS_BETWEEN_LINES, concurrent.futures.FIRST_COMPLETED
            )
            for future in ended:
                future.result()
            progress.add(sum(size_of[future] for future in ended))
    progress.end()


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def require_guarded_main() -> None:
    """Raises ConfigError in a process that imports the user's script only to have its functions.

    What the script does unguarded, the process would do again, and wait for its parent for ever.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigError(
            "A process that reads data imports the script that was started, to find its "
            "functions, and that reads data, too. Put what the script does, but for its "
            "functions and classes, under: if __name__ == '__main__':"
        )


@contextlib.contextmanager
def _pool(
    function: Callable[[Any], Any], number: int
) -> Iterator[concurrent.futures.ProcessPoolExecutor]:
    # Spawned, not forked: a copy of a process with JAX's threads hangs sooner or later.
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(
        number, context, initializer=_begin, initargs=(function, os.getpid())
    )
    try:
        yield pool
    except concurrent.futures.process.BrokenProcessPool:
        pool.shutdown(wait=False, cancel_futures=True)
        raise ConfigError(
            "A process that was to read data ended by itself. What it wrote above says why; if it "
            "wrote nothing, the system ended it, mostly for want of memory: give the job more, or "
            f"fewer cores than its {number} (taskset)."
        ) from None
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in list((pool._processes or {}).values()):
            process.kill()
        raise
    pool.shutdown()


def _begin(function: Callable[[Any], Any], parent: int) -> None:
    global _function
    _function = function
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent answers it.
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """Ends this process when its parent is gone, which cannot tell it."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _call(item: Any) -> Any:
    return _function(item)


_function: Callable[[Any], Any] = id


class _Progress:
    """Logs how many examples are done, at most every 5 s."""

    def __init__(self, what: str, total: int):
        self.what, self.total, self.done = what, total, 0
        self.began = self.logged = time.monotonic()

    def add(self, size: int) -> None:
        self.done += size
        now = time.monotonic()
        if now - self.logged < _SECONDS_BETWEEN_LINES:
            return
        self.logged, elapsed = now, now - self.began
        left = elapsed * (self.total - self.done) / max(1, self.done)
        _log.info(
            "%s: %s of %s examples (%.0f%%), %s", self.what, f"{self.done:,}", f"{self.total:,}",
            100 * self.done / max(1, self.total),
            f"about {left:.0f} s left" if self.done else f"{elapsed:.0f} s so far",
        )

    def end(self) -> None:
        if self.logged != self.began:
            _log.info("%s: done in %.0f s", self.what, time.monotonic() - self.began)


_log = logging.getLogger(__name__)
