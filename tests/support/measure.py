"""Measures the time, the launched processes and the XLA compilations of each test.

    python -m pytest -n 2 --dist loadfile -p tests.support.measure --measure=FILE.jsonl
    python -m tests.support.measure FILE.jsonl [FILE.jsonl ...]

The first command appends a line to the file for each test; if a test has several lines, the last
one counts. The second command prints tables. The cost of a shared fixture is assigned to the tests
that set it up and tear it down. Launches and compilations are counted only in the process that runs
the tests. `child_cpu` is the CPU time in seconds of all descendant processes that have ended.
"""

import collections
import json
import multiprocessing.util
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

COMPILED = "/jax/core/compile/backend_compile_duration"
FROM_CACHE = "/jax/compilation_cache/cache_hits"
# subprocess.Popen may call os.posix_spawn. Counting both events would count a process twice.
LAUNCHES = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.system"})
PHASES = ("setup", "call", "teardown")

Record = dict[str, Any]


def pytest_addoption(parser):
    parser.addoption("--measure", metavar="FILE", help="append a JSON line to FILE for each test")


def pytest_configure(config):
    if file := config.getoption("measure"):
        config.pluginmanager.register(TestMeter(Path(file).resolve()))


class TestMeter:
    """Writes a line for each test that this process runs; each pytest-xdist worker has a meter."""

    __test__ = False

    def __init__(self, file: Path):
        self._file, self._reports = file, {}
        self._totals = collections.Counter()

    def pytest_collection_finish(self):
        _count_launches(self._count)
        # tests/conftest.py must run first, because it sets the environment before JAX starts.
        if "jax" in sys.modules:
            _count_programs(self._count)

    def _count(self, name: str, amount: float = 1):
        self._totals[name] += amount

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self._reports, before = {}, self._now()
        result = yield
        used = {name: round(x - before[name], 4) for name, x in self._now().items()}
        outcomes = [report.outcome for report in self._reports.values()]
        record = {
            "test": item.nodeid,
            "outcome": next((x for x in ("failed", "skipped") if x in outcomes), "passed"),
            "slow": item.get_closest_marker("slow") is not None,
            **{x: round(report.duration, 4) for x, report in self._reports.items()},
            **used,
        }
        # A single write, so that the lines of several workers are not interleaved.
        with self._file.open("ab", buffering=0) as file:
            file.write(f"{json.dumps(record)}\n".encode())
        return result

    def pytest_runtest_logreport(self, report):
        self._reports[report.when] = report

    def _now(self) -> dict[str, float]:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return {
            "cpu": time.process_time(),
            "child_cpu": children.ru_utime + children.ru_stime,
            **{x: self._totals[x] for x in ("launches", "programs", "cached", "compile_seconds")},
        }


def _count_launches(count: Callable[..., None]):
    pid = os.getpid()

    def hook(event, _):
        if event in LAUNCHES and os.getpid() == pid:
            count("launches")

    sys.addaudithook(hook)
    # Python raises no audit event where multiprocessing spawns a process.
    spawn = multiprocessing.util.spawnv_passfds

    def counted_spawn(*args):
        count("launches")
        return spawn(*args)

    multiprocessing.util.spawnv_passfds = counted_spawn


def _count_programs(count: Callable[..., None]):
    import jax

    def on_duration(name, seconds, **_):
        if name == COMPILED:
            count("programs")
            count("compile_seconds", seconds)

    jax.monitoring.register_event_duration_secs_listener(on_duration)
    # JAX also reports a duration for executables from its persistent cache.
    jax.monitoring.register_event_listener(lambda name, **_: name == FROM_CACHE and count("cached"))


def read_measures(paths: Iterable[Path]) -> dict[str, Record]:
    """Returns the last record of each test, by the test's name."""
    lines = (line for path in paths for line in path.read_text(encoding="utf-8").splitlines())
    return {record["test"]: record for record in map(json.loads, lines)}


def seconds_of(record: Record) -> float:
    """Returns the duration of a test, including setup and teardown."""
    return sum(record.get(phase, 0.0) for phase in PHASES)


def tables(records: Sequence[Record], num_rows: int = 25) -> Iterator[str]:
    """Yields the lines of the tables."""
    quick = [record for record in records if not record["slow"]]
    slow = [record for record in records if record["slow"]]
    yield from _table("totals", {"quick": quick, "slow": slow, "all": [*records]}, num_rows)
    files, tests = collections.defaultdict(list), {}
    for record in records:
        files[record["test"].partition("::")[0]].append(record)
        tests[record["test"][:110]] = [record]
    for title, groups, size in (
        ("slowest files", files, seconds_of),
        ("slowest tests", tests, seconds_of),
        ("files by processes launched", files, lambda record: record["launches"]),
        ("files by CPU seconds of processes", files, lambda record: record["child_cpu"]),
        ("files by programs compiled", files, lambda record: record["programs"]),
        ("files by seconds of compilation", files, lambda record: record["compile_seconds"]),
    ):
        sizes = {name: sum(map(size, group)) for name, group in groups.items()}
        order = sorted((name for name in sizes if sizes[name]), key=lambda name: -sizes[name])
        yield ""
        yield from _table(title, {name: groups[name] for name in order}, num_rows)


def _table(title: str, groups: dict[str, list[Record]], num_rows: int) -> list[str]:
    from praxis_lite.host.text_table import table_lines

    counts = ("cpu", "child_cpu", "launches", "programs", "cached", "compile_seconds")
    rows = [[title, "tests", "seconds", *(name.replace("_", " ") for name in counts)]]
    for name, group in [*groups.items()][:num_rows]:
        sums = [sum(map(seconds_of, group)), *(sum(x[key] for x in group) for key in counts)]
        rows.append([name, str(len(group)), *(f"{x:.0f}" for x in sums)])
    return table_lines(rows, right=range(1, len(rows[0])))


def main(arguments: Sequence[str]) -> int:
    """Prints the tables for the given files."""
    if not arguments:
        print(__doc__)
        return 2
    print(*tables([*read_measures(map(Path, arguments)).values()]), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
