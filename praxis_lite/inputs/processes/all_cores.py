"""Calls a function on many items in parallel, using one process per core, and logs progress."""

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

# Minimum number of examples for which processes are started, which takes half a second.
_MIN_EXAMPLES_FOR_PROCESSES = 8_192
_SECONDS_BETWEEN_LINES = 5.0


def run_on_all_cores(
    function: Callable[[Any], Any], items: Sequence[Any], sizes: Sequence[int], description: str
) -> None:
    """Calls a function with each item, and discards the results.

    With many examples, one process per core calls the function, and progress is logged every 5 s.
    With few examples, the current process calls the function.

    Args:
      function: Function to call; must be picklable.
      items: Arguments of the calls; must be picklable.
      sizes: Number of examples in each item.
      description: Description of the work for log messages, such as "tokenizing into FOLDER".

    Raises:
      ConfigError: A process crashed or was killed.
      Exception: The function raised an exception. Remaining items are not processed.
    """
    progress = _Progress(description, sum(sizes))
    if sum(sizes) < _MIN_EXAMPLES_FOR_PROCESSES:
        for item, size in zip(items, sizes, strict=True):
            function(item)
            progress.add(size)
        return
    with _process_pool(function, min(len(items), num_cores())) as pool:
        sizes_by_future = {
            pool.submit(_call, item): size for item, size in zip(items, sizes, strict=True)
        }
        pending = set(sizes_by_future)
        while pending:
            done, pending = concurrent.futures.wait(
                pending, _SECONDS_BETWEEN_LINES, concurrent.futures.FIRST_COMPLETED
            )
            for future in done:
                # Raises the exception of the call, if any.
                future.result()
            progress.add(sum(sizes_by_future[future] for future in done))
    progress.end()


def num_cores() -> int:
    """Returns the number of cores available to this process."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def require_guarded_main() -> None:
    """Raises ConfigError if the user's script lacks an `if __name__ == "__main__"` guard.

    A spawned process imports the script to unpickle its functions. Without a guard, this import
    would run the script again, which would then wait forever for a lock held by the parent.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigError(
            "The script reads data when a worker process imports it to find its functions. Move "
            "all statements except imports, functions and classes under: "
            "if __name__ == '__main__':"
        )


@contextlib.contextmanager
def _process_pool(
    function: Callable[[Any], Any], num_processes: int
) -> Iterator[concurrent.futures.ProcessPoolExecutor]:
    # Spawn, because forking a process with JAX's threads can deadlock.
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(
        num_processes,
        context,
        initializer=_initialize_process,
        initargs=(function, os.getpid()),
    )
    try:
        yield pool
    except concurrent.futures.process.BrokenProcessPool:
        pool.shutdown(wait=False, cancel_futures=True)
        raise ConfigError(
            "A worker process that reads data ended unexpectedly. Its output above may show the "
            "reason. If there is no output, the kernel probably killed it for lack of memory. Give "
            f"the job more memory, or fewer than {num_processes} cores (taskset)."
        ) from None
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in list((pool._processes or {}).values()):
            process.kill()
        raise
    pool.shutdown()


def _initialize_process(function: Callable[[Any], Any], parent_pid: int) -> None:
    global _function
    _function = function
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent handles Ctrl-C.
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_exit_with_parent, args=(parent_pid,), daemon=True).start()


def _exit_with_parent(parent_pid: int) -> None:
    """Exits once the parent process has exited; a killed parent cannot stop its children."""
    while os.getppid() == parent_pid:
        time.sleep(0.5)
    os._exit(1)


def _call(item: Any) -> Any:
    return _function(item)


# Set once per process, because pickling the function with each item would take longer.
_function: Callable[[Any], Any] = id


class _Progress:
    """Logs the number of processed examples, at most every 5 s."""

    def __init__(self, description: str, num_total: int):
        self.description, self.num_total, self.num_done = description, num_total, 0
        self.start_time = self.last_log_time = time.monotonic()

    def add(self, num_examples: int) -> None:
        self.num_done += num_examples
        now = time.monotonic()
        if now - self.last_log_time < _SECONDS_BETWEEN_LINES:
            return
        self.last_log_time, elapsed = now, now - self.start_time
        remaining = elapsed * (self.num_total - self.num_done) / max(1, self.num_done)
        _log.info(
            "%s: %s of %s examples (%.0f%%), %s",
            self.description,
            f"{self.num_done:,}",
            f"{self.num_total:,}",
            100 * self.num_done / max(1, self.num_total),
            f"about {remaining:.0f} s left" if self.num_done else f"{elapsed:.0f} s so far",
        )

    def end(self) -> None:
        if self.last_log_time != self.start_time:
            _log.info("%s: done in %.0f s", self.description, time.monotonic() - self.start_time)


_log = logging.getLogger(__name__)
