"""Passes thousands of damaged files to every reader of untrusted files: `--only "file readers"`.

Each trial runs in a separate process, forked from a process that has imported everything. The trial
must succeed or raise a ConfigError within 10 s and 1 GB of memory. Other exceptions and signals are
failures. `tests.faults.reader_list` lists the readers.
"""

import dataclasses
import functools
import os
import random
import resource
import select
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from praxis_lite.core.errors import ConfigError
from tests.faults.mutants import mutate
from tests.faults.outcome import Row

SECONDS, MEMORY = 10.0, 1_000_000_000
MAX_MESSAGE = 5_000  # Maximum number of characters in an error message.
_READ, _REFUSED, _RAISED, _NO_MEMORY, _LONG = 0, 2, 3, 4, 5


@dataclasses.dataclass(frozen=True)
class Reader:
    """A reader of files.

    Attributes:
      name: Name in the report and in --readers.
      make: Function that writes undamaged files into an empty folder. It is called once for all
        readers that have it.
      read: Function that reads all files in a folder.
      share: Relative number of trials; less than 1.0 for slow readers.
      seconds: Time limit of a trial; more for readers that compile.
      prune: Function that deletes files which `read` does not read.
    """

    name: str
    make: Callable[[Path], None]
    read: Callable[[Path], object]
    share: float = 1.0
    seconds: float = SECONDS
    prune: Callable[[Path], None] = lambda folder: None


def run(
    readers: Sequence[Reader],
    num_files: int,
    seed: int,
    say: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """Returns a row for each reader. The number of files is divided among the readers."""
    shares = sum(item.share for item in readers)
    rows, made = [], {}
    with tempfile.TemporaryDirectory(prefix="readers_") as folder:
        for reader in readers:
            count = max(1, round(num_files * reader.share / shares))
            say(f"  {count:,} files for {reader.name} ...")
            if reader.make not in made:
                made[reader.make] = Path(folder) / f"made{len(made)}"
                made[reader.make].mkdir()
                outcome, _, words = _tried(
                    functools.partial(reader.make, made[reader.make]), 120.0, Path(folder)
                )
                assert outcome == _READ, f"{reader.name}: {words}"
            home = Path(folder) / reader.name
            shutil.copytree(made[reader.make], home / "whole", symlinks=True)
            reader.prune(home / "whole")
            rows.append(_row(reader, home, count, random.Random(f"{seed} {reader.name}")))
            shutil.rmtree(home)
    return rows


def _row(reader: Reader, home: Path, count: int, chance: random.Random) -> Row:
    row, whole = Row(f"damaged {reader.name}"), home / "whole"
    outcome, least, words = _tried(lambda: reader.read(_copy(whole, home)), 60.0, home)
    if outcome != _READ:
        row.tried, row.failures = 1, [f"undamaged files: {words}"]
        return row
    slowest = 0.0
    for _ in range(count):
        folder = _copy(whole, home)
        change = mutate(folder, chance)
        start = time.monotonic()
        outcome, memory, words = _tried(lambda: reader.read(folder), reader.seconds, home)  # noqa: B023
        slowest = max(slowest, time.monotonic() - start)
        row.tried += 1
        if outcome not in (_READ, _REFUSED):
            row.failures.append(f"{change}: {words}")
        elif memory > least + MEMORY:
            row.failures.append(f"{change}: {(memory - least) / 1e9:.1f} GB of memory")
        elif outcome == _REFUSED:
            row.figures["rejected"] = row.figures.get("rejected", 0) + 1
    row.figures["slowest"] = f"{slowest:.1f} s"
    return row


def _copy(whole: Path, home: Path) -> Path:
    folder = home / "broken"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder, symlinks=True)
    return folder


def _tried(action: Callable[[], object], seconds: float, home: Path) -> tuple[int, int, str]:
    """Runs an action in a forked process. Returns its status, memory in bytes, and output."""
    output = home / "output.txt"
    ended, ends = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(ended)
        _child(action, output)
    os.close(ends)
    # The pipe closes when the process and all its descendants have exited.
    hangs = not select.select([ended], [], [], seconds)[0]
    if hangs:
        os.kill(pid, signal.SIGKILL)
    os.close(ended)
    _, status, usage = os.wait4(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    words = output.read_text(errors="replace")[-700:] if output.exists() else ""
    if hangs:
        words = f"not finished after {seconds:.0f} s"
    elif code not in (_READ, _REFUSED):
        words = f"status {code}: " + " / ".join(words.splitlines())
    return -signal.SIGKILL if hangs else code, usage.ru_maxrss * 1024, words


def _child(action: Callable[[], object], output: Path) -> None:
    code = _RAISED
    try:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number in (1, 2):
            os.dup2(descriptor, number)
        # Protect the machine: a trial that needs much more memory has failed anyway.
        limit = _data_bytes() + 3 * MEMORY
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        action()
        code = _READ
    except ConfigError as error:
        code = _REFUSED
        os.write(2, str(error)[:MAX_MESSAGE].encode(errors="replace"))
        if not 0 < len(str(error)) <= MAX_MESSAGE:
            code = _LONG
            os.write(2, f"; a message of {len(str(error))} characters".encode())
    except MemoryError:
        code = _NO_MEMORY
        os.write(2, traceback.format_exc(limit=-4).encode(errors="replace"))
    except BaseException:
        os.write(2, traceback.format_exc(limit=-4).encode(errors="replace"))
    finally:
        os._exit(code)


def _data_bytes() -> int:
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[5]) * resource.getpagesize() if pages.exists() else 0


def named(readers: Sequence[Reader], names: Sequence[str] | None) -> Iterator[Reader]:
    """Yields the readers with the given names, or all readers if `names` is None."""
    known = [reader.name for reader in readers]
    for name in names or ():
        if name not in known:
            raise SystemExit(f"There is no reader {name!r}; there are {', '.join(known)}.")
    return (reader for reader in readers if names is None or reader.name in names)
