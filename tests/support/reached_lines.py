"""Records which tests reach each line of the library, with a coverage context per test.

    python -m tests.support.reached_lines FOLDER [--workers 2] [-m MARKS] [TEST_FILE ...]

Each test file runs in a separate process, so that cached results (a job that several files read, a
compiled function) are attributed to every file that uses them. FOLDER contains

    parts/   coverage data of each test file; test files with data are not run again, so use a
             different folder for different marks
    tests.jsonl   measurements of each test (tests.support.measure), under coverage
    .coverage   the combined data

Python processes that a test launches are covered too, unless the test removes
COVERAGE_PROCESS_START from their environment or a signal ends them. A context is the name of a test
and its phase, or the name of a test file for code that runs while the file is imported.
"""

import argparse
import ast
import concurrent.futures
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Container, Iterable, Sequence
from pathlib import Path

import pytest

from tests.support.measure import Record, read_measures, seconds_of
from tests.support.planted_mutants import PACKAGES, Mutant, function_lines

ROOT = Path(__file__).parents[2]
MEASURES = "tests.jsonl"
HANGS_AFTER_SECONDS = 1200
# sys.monitoring, the default in newer Python versions, reports a line only once, not per context.
# The context of pytest's process is its test file, to which the plugin below adds the test. The
# context of a launched process is the test in the environment variable that pytest sets.
SETTINGS = """\
[run]
source = {source}
data_file = {data_file}
parallel = true
core = ctrace
context = ${{PYTEST_CURRENT_TEST-}}
patch = _exit, fork
"""


def _switch_context(item, phase: str):
    import coverage

    current = coverage.Coverage.current()
    if current is not None:
        current.switch_context(f"{item.nodeid} ({phase})")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    _switch_context(item, "setup")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    _switch_context(item, "call")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item):
    _switch_context(item, "teardown")


def collect(
    root: Path, folder: Path, files: Sequence[str], arguments: Sequence[str] = (), workers: int = 2
) -> list[str]:
    """Runs test files under coverage, and combines the results.

    Args:
      root: The checkout; its packages are covered.
      files: Test files, relative to root.
      arguments: Additional arguments of pytest.

    Returns:
      The files that pytest could not run. Failed tests are ignored.
    """
    import coverage

    parts = folder / "parts"
    parts.mkdir(parents=True, exist_ok=True)
    failed = []

    def run(file: str):
        part = parts / f"{file.replace('/', '__')}.coverage"
        if not part.exists():
            code = _run_covered(root, file, arguments, part, folder / MEASURES)
            if not part.exists():
                failed.append(file)
            print(f"{file}: pytest ended with {code}", flush=True)

    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        list(pool.map(run, files))
    (folder / ".coverage").unlink(missing_ok=True)
    whole = coverage.Coverage(data_file=folder / ".coverage", config_file=False)
    whole.combine([str(path) for path in sorted(parts.glob("*.coverage"))], keep=True)
    whole.save()
    return failed


def _run_covered(
    root: Path, file: str, arguments: Sequence[str], part: Path, measures: Path
) -> int:
    import coverage

    with tempfile.TemporaryDirectory(prefix="reached_", ignore_cleanup_errors=True) as temporary:
        settings = Path(temporary) / "coveragerc"
        source = "".join(f"\n    {root / package}" for package in PACKAGES)
        data_file = Path(temporary) / "data"
        settings.write_text(SETTINGS.format(source=source, data_file=data_file))
        env = {
            **os.environ,
            "PYTHONPATH": f"{root}{os.pathsep}{ROOT}",
            "PYTEST_CURRENT_TEST": file,
            "COVERAGE_PROCESS_START": str(settings),
        }
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:randomly",
            "-p",
            "tests.support.measure",
            "-p",
            "tests.support.reached_lines",
            f"--measure={measures.resolve()}",
            f"--basetemp={temporary}/tests",
            "-o",
            f"faulthandler_timeout={HANGS_AFTER_SECONDS}",
            "-o",
            "faulthandler_exit_on_timeout=true",
            *arguments,
            file,
        ]
        with open(part.with_suffix(".log"), "wb") as log:
            code = subprocess.run(
                command, cwd=root, env=env, stdout=log, stderr=subprocess.STDOUT, check=False
            ).returncode
        if written := [str(path) for path in Path(temporary).glob("data.*")]:
            data = coverage.Coverage(data_file=f"{temporary}/combined", config_file=False)
            data.combine(written)
            data.save()
            # Otherwise, pytest's process was killed, for example after a timeout.
            if file in data.get_data().measured_contexts():
                shutil.move(f"{temporary}/combined", part)
    return code


@dataclasses.dataclass(frozen=True)
class Reach:
    """What reaches some lines: tests during their call, and test files by fixtures or imports."""

    tests: frozenset[str]
    by_fixtures: frozenset[str]
    by_imports: frozenset[str]


class ReachedLines:
    """The results that `collect` wrote to a folder."""

    def __init__(self, folder: Path):
        import coverage

        self._data = coverage.CoverageData(str(folder / ".coverage"))
        self._data.read()
        measured = self._data.measured_files()
        self._paths = {name: path for path in measured if (name := _in_checkout(path))}
        self.measures: dict[str, Record] = read_measures([folder / MEASURES])
        self._passing = {x for x in self.measures if self.measures[x]["outcome"] == "passed"}

    def by_lines(self, file: str, lines: Container[int]) -> Reach:
        """Returns what reaches any of these lines of a file in the library."""
        tests, fixtures, imports = set(), set(), set()
        if file in self._paths:
            by_line = self._data.contexts_by_lineno(self._paths[file])
            reached = (contexts for line, contexts in by_line.items() if line in lines)
            for context in {x for contexts in reached for x in contexts}:
                test, phase = _test_and_phase(context)
                test_file = test.partition("::")[0]
                if test == test_file:
                    imports.add(test_file)
                elif phase == "call":
                    tests.add(test)
                else:
                    fixtures.add(test_file)
        return Reach(frozenset(tests), frozenset(fixtures), frozenset(imports - {""}))

    def stages(self, mutant: Mutant) -> list[list[str]]:
        """Returns the tests to run for a fault, in stages; running stops after a detection.

        The first stage contains the tests that reach the changed statement, and the files whose
        fixtures reach it. The second stage contains all tests of these files, because a test may
        use what another test has cached or set up. Tests that failed or were skipped under coverage
        are left out. For a statement that runs at import, the first stages contain the tests that
        reach any function of its file, and then all tests that import the file.
        """
        first, last = mutant.statement
        reach, importers = self.by_lines(mutant.file, range(first, last + 1)), set()
        if not mutant.is_in_function:
            importers = reach.by_imports | reach.by_fixtures
            importers |= {test.partition("::")[0] for test in reach.tests}
            source = Path(self._paths[mutant.file]).read_text(encoding="utf-8") if importers else ""
            reach = self.by_lines(mutant.file, function_lines(ast.parse(source)))
        first = {*reach.tests, *self._tests_of(reach.by_fixtures)} & self._passing
        second = self._tests_of(test.partition("::")[0] for test in first)
        third = self._tests_of(importers) - second
        return [self._by_file(stage) for stage in (first, second, third) if stage]

    def _tests_of(self, files: Iterable[str]) -> set[str]:
        files = {*files}
        return {test for test in self._passing if test.partition("::")[0] in files}

    def seconds(self, test: str) -> float:
        """Returns the duration of a test under coverage."""
        return seconds_of(self.measures[test])

    def _by_file(self, tests: Iterable[str]) -> list[str]:
        """Groups tests by file: quick tests before slow tests, then the fastest files first.

        The tests of a file stay in order, because some need the setup of previous tests.
        """
        order = {test: number for number, test in enumerate(self.measures)}
        groups: dict[tuple[bool, str], list[str]] = {}
        for test in sorted(tests, key=order.__getitem__):
            group = (self.measures[test]["slow"], test.partition("::")[0])
            groups.setdefault(group, []).append(test)
        costs = {group: sum(map(self.seconds, tests)) for group, tests in groups.items()}
        in_turn = sorted(groups, key=lambda group: (group[0], costs[group], group[1]))
        return [test for group in in_turn for test in groups[group]]


def _in_checkout(path: str) -> str:
    """Returns the path of a measured file relative to its checkout, or "" outside of packages."""
    parts = Path(path).parts
    for number in range(len(parts) - 1, 0, -1):
        if parts[number] in PACKAGES:
            return "/".join(parts[number:])
    return ""


def _test_and_phase(context: str) -> tuple[str, str]:
    """Splits "file|test (phase)" of pytest's process, or "test (phase)" of a child process."""
    head, bar, rest = context.partition("|")
    test = rest if bar and "::" not in head else context
    if "::" not in test:
        return test, ""
    name, _, phase = test.rpartition(" (")
    return name, phase.removesuffix(")")


def main(arguments: Sequence[str]) -> int:
    """Collects coverage for test files of this checkout; returns 1 if pytest could not run some."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.reached_lines")
    parser.add_argument("folder", type=Path)
    parser.add_argument("files", nargs="*", help="default: all files")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("-m", dest="marks", help='such as "not slow"')
    args = parser.parse_intermixed_args(arguments)
    found = [path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("tests/**/test_*.py"))]
    marks = ["-m", args.marks] if args.marks else []
    failed = collect(ROOT, args.folder, args.files or found, marks, args.workers)
    if failed:
        print("pytest could not run, see parts/*.log:", *failed, sep="\n  ")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
