"""Determines which tests detect small faults (mutants) in the library: `make mutants`.

    python -m tests.support.reached_faults FOLDER              which tests reach which fault
    python -m tests.support.mutants list                       the faults
    python -m tests.support.mutants run --reached FOLDER --out FILE.jsonl     hours; can be resumed
    python -m tests.support.mutants table FILE.jsonl --reached FOLDER

`run` copies the checkout for each worker. It plants one fault at a time, runs the tests that reach
the changed statement, fastest first, until --limit seconds have passed, and records all failures,
or only the first one (--first). Tests that also fail without the fault are ignored. FILE.jsonl has
a record for each fault. A fault with a record is skipped, unless no test detected it, tests were
left out, and --limit has grown.

Faulty code runs with your permissions, and may write or delete any files: use a container.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support.measure import Record as Measure
from tests.support.measure import read_measures, seconds_of
from tests.support.planted_mutants import KINDS, PACKAGES, Mutant, plant
from tests.support.reached_faults import MEASURES, ROOT, ReachedFaults, copy_checkout

Record = dict[str, Any]
# A test hangs if it takes longer than this and five times its usual time.
HANGS_AFTER_SECONDS = 30.0
# If more tests fail than this, they are not rerun, because they cannot all be unreliable.
MOST_CONFIRMED = 20


class Tree:
    """A copy of the checkout, in which one fault at a time is planted and its tests are run."""

    def __init__(self, root: Path, folder: Path, only_first: bool):
        self.root, self._temporary = copy_checkout(root, folder), folder / "tmp"
        self._only_first = only_first
        # By default, Python detects changes of a file by its size and its mtime in seconds.
        subprocess.run(
            [
                sys.executable,
                "-m",
                "compileall",
                "-q",
                "--invalidation-mode=checked-hash",
                *(name for name in (*PACKAGES, "tests") if (root / name).exists()),
            ],
            cwd=self.root,
            check=True,
        )

    @contextlib.contextmanager
    def planted(self, mutant: Mutant) -> Iterator[None]:
        """Context manager during which the copy contains the fault."""
        path = self.root / mutant.file
        source = path.read_bytes()
        path.write_bytes(mutant.applied(source))
        try:
            yield
        finally:
            path.write_bytes(source)

    def outcomes(self, tests: Sequence[str], stop_at: float, hangs_after: float) -> dict[str, str]:
        """Runs tests until time.time() is `stop_at`, but at least one test.

        Returns:
          "passed" or "failed" for each test that ran. Skipped tests count as passed. A test that
          hangs or kills its process counts as failed. So does a file that cannot be imported.
        """
        actual: dict[str, str] = {}
        left = list(tests)
        while left:
            found, code = self._one_run(left, stop_at, hangs_after)
            if not found and code not in (0, 1, 5):  # tests/conftest.py cannot be imported.
                found = {test.partition("::")[0]: "failed" for test in left}
            actual |= found
            has_failed = "failed" in actual.values()
            if not found or time.time() > stop_at or (self._only_first and has_failed):
                break  # If there are none, the fault removed the parameters of these tests.
            left = [x for x in left if x not in actual and x.partition("::")[0] not in actual]
        return actual

    def _one_run(
        self, tests: Sequence[str], stop_at: float, hangs_after: float
    ) -> tuple[dict[str, str], int | None]:
        """Returns how tests ended in one process, and its exit code, or None if it was killed."""
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary.mkdir()
        chosen, events = self._temporary / "chosen.json", self._temporary / "events"
        events.touch()
        chosen.write_text(
            json.dumps(
                {
                    "tests": list(tests),
                    "stop_at": stop_at,
                    "only_first": self._only_first,
                    "events": str(events),
                }
            )
        )
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:randomly",  # The tests of a file stay in their order.
            "-p",
            "tests.support.chosen_tests",
            f"--chosen={chosen}",
            "--tb=no",
            "--continue-on-collection-errors",
            f"--basetemp={self._temporary}/t",
            "-o",
            f"faulthandler_timeout={hangs_after}",
            "-o",
            "faulthandler_exit_on_timeout=true",
            *dict.fromkeys(test.partition("::")[0] for test in tests),
        ]
        env = {
            **os.environ,
            "PYTHONPATH": f"{self.root}{os.pathsep}{ROOT}",
            "TMPDIR": str(self._temporary),
        }
        process = subprocess.Popen(
            command,
            cwd=self.root,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            # The last test starts before `stop_at`, and importing hundreds of files takes minutes.
            code = process.wait(max(0.0, stop_at - time.time()) + hangs_after + 300)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            process.kill()
            process.wait()
            self._kill_what_tests_left()
        actual, running = {}, None
        for line in events.read_text(encoding="utf-8").splitlines():
            test, event = json.loads(line)
            running = {"started": test, "ended": None}.get(event, running)
            if event == "failed":
                actual[test] = "failed"
            elif event == "ended":
                actual.setdefault(test, "passed")
        if running is not None:
            actual[running] = "failed"
        return actual, code

    def _kill_what_tests_left(self):
        # Some processes start their own session, but all refer to the temporary folder.
        mark = f"TMPDIR={self._temporary}".encode()
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # It has already ended.
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    os.kill(int(process.name), signal.SIGKILL)


class Confirmed:
    """Reruns failed tests without the fault, to ignore tests that fail anyway."""

    def __init__(self, records: Iterable[Record]):
        # Keyed by a test and all tests of its file that ran, because it may need their setup.
        self._failed: set[tuple[str, tuple[str, ...]]] = set()
        self._passed = {
            test
            for record in records
            if len(record["failed"]) <= MOST_CONFIRMED
            for test in record["failed"]
        }

    def reliable(
        self, tree: Tree, failed: Iterable[str], tests: Sequence[str], hangs_after: float
    ) -> list[str]:
        """Returns the failed tests that pass without the fault.

        Args:
          tests: All tests that were run, in order.
        """
        by_file = {x: tuple(_of_file(x, tests)) for x in {x.partition("::")[0] for x in tests}}
        keys = {x: (x, by_file.get(x.partition("::")[0], ())) for x in sorted(failed)}
        unknown = [
            x for x in keys if "::" in x and x not in self._passed and keys[x] not in self._failed
        ]
        if 0 < len(unknown) <= MOST_CONFIRMED:
            files = dict.fromkeys(x.partition("::")[0] for x in unknown)
            again = [test for file in files for test in by_file[file]]
            outcomes = tree.outcomes(again, sys.maxsize, hangs_after)
            self._passed |= {test for test in again if outcomes.get(test) == "passed"}
            self._failed |= {keys[x] for x in unknown if x not in self._passed}
        return [x for x in keys if x in self._passed or keys[x] not in self._failed]


def _of_file(file: str, tests: Iterable[str]) -> list[str]:
    return [test for test in tests if test.partition("::")[0] == file]


def run(
    root: Path,
    mutants: Sequence[Mutant],
    reached: ReachedFaults,
    out: Path,
    limit: float,
    workers: int = 2,
    only_first: bool = False,
) -> None:
    """Plants each fault that has no record yet, and appends its record."""
    records = read_records(out)
    left = [x for x in mutants if not _is_done(records.get(x.name), limit)]
    confirmed = Confirmed(records.values())
    trees: queue.SimpleQueue[Tree] = queue.SimpleQueue()
    writing = threading.Lock()

    def record(number: int, mutant: Mutant):
        tree = trees.get()
        try:
            actual = _record(tree, mutant, reached, limit, confirmed)
        finally:
            trees.put(tree)
        with writing, out.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(actual)}\n")
        ending = f"{len(actual['failed'])} of {len(actual['passed']) + len(actual['failed'])} fail"
        print(f"{number}/{len(left)} {mutant.name}: {ending}", flush=True)

    with tempfile.TemporaryDirectory(prefix="mutants_", ignore_cleanup_errors=True) as folder:
        for number in range(workers):
            trees.put(Tree(root, Path(folder) / str(number), only_first))
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            futures = [pool.submit(record, *item) for item in enumerate(left, 1)]
            try:
                for future in concurrent.futures.as_completed(futures):
                    future.result()
            finally:
                pool.shutdown(cancel_futures=True)


def read_records(path: Path) -> dict[str, Record]:
    """Returns the last record of each fault, by the fault's name."""
    if not path.exists():
        return {}
    records = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {record["name"]: record for record in records}


def _is_done(record: Record | None, limit: float) -> bool:
    if record is None:
        return False
    return bool(record["failed"]) or not record["left_out"] or limit <= record["limit"]


def _record(
    tree: Tree, mutant: Mutant, reached: ReachedFaults, limit: float, confirmed: Confirmed
) -> Record:
    start, stages = time.time(), reached.stages(mutant)
    outcomes: dict[str, str] = {}
    failed, failing, planned = [], set(), set()
    for stage in stages:
        planned |= {*stage}
        tests = _affordable(stage, reached, start + limit - time.time())
        if not tests:
            break
        hangs_after = max(HANGS_AFTER_SECONDS, *(5 * reached.seconds(x) for x in tests))
        with tree.planted(mutant):
            found = tree.outcomes(tests, start + limit, hangs_after)
        outcomes |= found
        failing = {x for x in found if found[x] == "failed"}
        failed = confirmed.reliable(tree, failing, tests, hangs_after)
        if failed:
            break
    return {
        "name": mutant.name,
        **dataclasses.asdict(mutant),
        "is_reached": bool(stages),
        "failed": failed,
        "passed": [x for x in outcomes if outcomes[x] == "passed"],
        "unreliable": sorted(failing.difference(failed)),
        "left_out": len(planned - outcomes.keys()),
        "limit": limit,
        "seconds": round(time.time() - start, 1),
    }


def _affordable(stage: Sequence[str], reached: ReachedFaults, seconds: float) -> list[str]:
    """Returns as many of the first tests of a stage as fit into the time limit."""
    tests = []
    for test in stage:
        seconds -= reached.seconds(test)
        if seconds < 0:
            break
        tests.append(test)
    return tests


def tables(records: Sequence[Record], measures: dict[str, Measure]) -> Iterator[str]:
    """Yields the lines of the tables: undetected faults by kind and package, and needed tests."""
    caught = {x["name"]: {*x["failed"]} for x in records if x["failed"]}
    by_quick = {
        name
        for name, tests in caught.items()
        if any(not measures.get(test, {"slow": False})["slow"] for test in tests)
    }
    groups = {kind: [x for x in records if x["kind"] == kind] for kind in KINDS}
    groups |= {name: [x for x in records if x["file"].startswith(name)] for name in PACKAGES}
    rows = [
        [
            "",
            "faults",
            "caught",
            "by a quick test",
            "escaped",
            "of these with tests left out",
            "of these unreached",
        ]
    ]
    for title, group in {**groups, "all": records}.items():
        escaped = [x for x in group if x["name"] not in caught]
        counts = (
            len(group),
            len(group) - len(escaped),
            sum(x["name"] in by_quick for x in group),
            len(escaped),
            sum(x["left_out"] > 0 for x in escaped),
            sum(not x["is_reached"] for x in escaped),
        )
        rows.append([title, *map(str, counts)])
    yield from _lines(rows)
    yield from ("", "escaped:")
    for x in records:
        if x["name"] not in caught:
            note = f" ({x['left_out']} tests left out)" if x["left_out"] else ""
            note = note if x["is_reached"] else " (unreached)"
            change = f"{x['before']!r:.70} -> {x['after']!r:.70}"
            yield f"  {x['file']}:{x['line']} {x['kind']}: {change}{note}"
    only = collections.Counter(next(iter(x)) for x in caught.values() if len(x) == 1)
    yield from ("", "tests that alone catch a fault, and how many:")
    yield from (f"  {num} {test}" for test, num in only.most_common())
    yield ""
    yield from _tests_by_file(records, measures, caught, only)
    if unreliable := {test for record in records for test in record["unreliable"]}:
        yield from ("", "tests that also failed without the fault, alone or with others:")
        yield from (f"  {test}" for test in sorted(unreliable))


def _tests_by_file(
    records: Sequence[Record],
    measures: dict[str, Measure],
    caught: dict[str, set[str]],
    only: Iterable[str],
) -> Iterator[str]:
    """Yields the table of test files; files without any needed test come first.

    A test is needed if it belongs to a greedy cover of all detected faults: repeatedly, the test
    that detects most of the remaining faults is added, the fastest one in a tie.
    """

    def seconds(test: str) -> float:
        return seconds_of(measures.get(test, {}))

    left, needed = dict(caught), set()
    while left:
        counts = collections.Counter(test for tests in left.values() for test in tests)
        best = min(counts, key=lambda test: (-counts[test], seconds(test), test))
        needed.add(best)
        left = {name: tests for name, tests in left.items() if best not in tests}
    ran = {test for x in records for test in (*x["passed"], *x["failed"])}
    failing = {test for tests in caught.values() for test in tests}
    files = collections.defaultdict(list)
    for test in {*measures, *ran}:
        files[test.partition("::")[0]].append(test)
    numbers = {
        file: (
            len(tests),
            round(sum(map(seconds, tests))),
            *(sum(test in group for test in tests) for group in (ran, failing, only, needed)),
        )
        for file, tests in files.items()
    }
    order = sorted(numbers, key=lambda file: (numbers[file][-1], -numbers[file][1], file))
    titles = ["test file", "tests", "seconds", "ran", "caught a fault", "alone", "needed"]
    yield from _lines([titles, *([file, *map(str, numbers[file])] for file in order)])


def _lines(rows: Sequence[Sequence[str]]) -> list[str]:
    from praxis_lite.host.text_table import table_lines

    return table_lines(rows, right=range(1, len(rows[0])))


def main(arguments: Sequence[str]) -> int:
    """Lists the faults, runs the tests with them, or prints the tables."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.mutants")
    parser.add_argument("command", choices=["list", "run", "table"])
    parser.add_argument("records", nargs="?", type=Path, help="for table: the file written by run")
    parser.add_argument("--num", type=int, default=300)
    parser.add_argument("--seed", type=int, default=53)
    parser.add_argument("--reached", type=Path, help="the folder of reached_faults")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--first", action="store_true", help="stop at the first test that fails")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds per fault")
    args = parser.parse_intermixed_args(arguments)
    if args.command == "table":
        if not (args.records and args.reached):
            parser.error("table needs FILE.jsonl and --reached FOLDER")
        measures = read_measures([args.reached / MEASURES])
        print(*tables([*read_records(args.records).values()], measures), sep="\n")
        return 0
    mutants = plant(ROOT, args.num, args.seed)
    if args.command == "list":
        for x in mutants:
            print(f"{x.file}:{x.line} {x.kind}: {x.before!r} -> {x.after!r}")
        return 0
    if not (args.reached and args.out):
        parser.error("run needs --reached FOLDER and --out FILE.jsonl")
    reached = ReachedFaults(ROOT, args.reached)
    if not {x.name for x in mutants} <= reached.names:
        parser.error(f"the library has changed since {args.reached} was written; remove it")
    run(ROOT, mutants, reached, args.out, args.limit, args.workers, args.first)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
