"""Records which tests reach the statements that planted faults change.

    python -m tests.support.reached_faults FOLDER [--num 300] [-m MARKS] [TEST_FILE ...]

tests.support.mutants plants the faults. This command runs the tests once in a copy of the checkout,
without faults. When a file is imported there, a call that records the current test is inserted
before each statement that a fault changes. Line numbers stay the same, and the tests are about as
fast as usual. Tests of imports fail in the copy, because it has one more module, and are left out
by tests.support.mutants. FOLDER then contains

    faults.json   the names of the faults, in order; written at the end
    reached/      a file for each process, with lines of a fault's number and a test and its phase
    tests.jsonl   measurements of each test (tests.support.measure)

Processes that a test launches are included if they inherit its environment. A result that several
test files share, such as a trained job, is attributed to the first that uses it.
"""

import argparse
import collections
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.support.measure import Record, read_measures, seconds_of
from tests.support.planted_mutants import PACKAGES, Mutant, plant

ROOT = Path(__file__).parents[2]
MEASURES = "tests.jsonl"
HANGS_AFTER_SECONDS = 1200
NOT_COPIED = (
    ".git",
    ".venv*",
    "__pycache__",
    ".pytest_cache",
    ".ruff_cache",
    "*_job",
    "build",
    "dist",
)
# A module of the copy. Importing it makes later imports of `PLACES` insert the calls.
RECORDER = '''\
"""Records which tests reach the statements with a fault."""

import ast
import importlib.machinery
import os
import sys

# For each file: the line of each statement with a fault, and the fault's number. Line 0 stands for
# the first statement of all functions of the file.
PLACES = {places!r}
FOLDER = {folder!r}
_seen = set()


def record(number):
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    if (number, test) not in _seen:
        _seen.add((number, test))
        with open(f"{{FOLDER}}/{{os.getpid()}}", "ab", buffering=0) as file:
            file.write(f"{{number}}\\t{{test}}\\n".encode())


class Loader(importlib.machinery.SourceFileLoader):
    def source_to_code(self, data, path, *, _optimization=-1):
        tree, numbers = ast.parse(data), {{}}
        for line, number in PLACES[path]:
            numbers.setdefault(line, []).append(number)
        for node in ast.walk(tree):
            for field in ("body", "orelse", "finalbody"):
                statements = getattr(node, field, None)
                if isinstance(statements, list):
                    setattr(node, field, [x for s in statements for x in self._with(s, numbers)])
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first = 1 if ast.get_docstring(node, clean=False) is not None else 0
                node.body[first:first] = self._calls(node.body[0], numbers.get(0, ()))
        return compile(ast.fix_missing_locations(tree), path, "exec", optimize=_optimization)

    def _with(self, statement, numbers):
        return [*self._calls(statement, numbers.get(statement.lineno, ())), statement]

    def _calls(self, place, numbers):
        for number in numbers:
            code = f"__import__({{__name__!r}}, fromlist=['record']).record({{number}})"
            call = ast.parse(code).body[0]
            for node in ast.walk(call):
                if hasattr(node, "lineno"):
                    ast.copy_location(node, place)
            yield call


class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.origin not in PLACES:
            return None
        spec.loader = Loader(name, spec.origin)
        return spec


sys.meta_path.insert(0, Finder)
'''


def copy_checkout(root: Path, folder: Path) -> Path:
    """Copies a checkout without what is built or hidden; returns the copy."""
    copy = folder / root.name
    shutil.copytree(root, copy, ignore=shutil.ignore_patterns(*NOT_COPIED), symlinks=True)
    return copy


def collect(
    root: Path,
    folder: Path,
    mutants: Sequence[Mutant],
    files: Sequence[str] = (),
    arguments: Sequence[str] = (),
    workers: int = 2,
) -> int:
    """Runs tests of a checkout once, records what they reach, and returns pytest's exit code.

    Args:
      root: The checkout.
      files: Test files, relative to root; all if empty.
      arguments: Additional arguments of pytest.
    """
    shutil.rmtree(folder / "reached", ignore_errors=True)
    (folder / MEASURES).unlink(missing_ok=True)
    (folder / "reached").mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="reached_", ignore_cleanup_errors=True) as temporary:
        copy = copy_checkout(root, Path(temporary))
        places = collections.defaultdict(list)
        for number, x in enumerate(mutants):
            line = x.statement if x.is_in_function else 0
            places[str(copy / x.file)].append((line, number))
        recorder = RECORDER.format(places=dict(places), folder=str((folder / "reached").resolve()))
        (copy / "praxis_lite/_reached.py").write_text(recorder)
        for package in PACKAGES:
            if (copy / package).exists():
                with (copy / package / "__init__.py").open("a") as file:
                    file.write("\nimport praxis_lite._reached\n")
        command = [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly"),
            *("-p", "tests.support.measure", f"--measure={(folder / MEASURES).resolve()}"),
            *("-n", str(workers), "--dist", "loadfile", f"--basetemp={temporary}/tests"),
            *("-o", f"faulthandler_timeout={HANGS_AFTER_SECONDS}"),
            *arguments,
            *files,
        ]
        env = {**os.environ, "PYTHONPATH": f"{copy}{os.pathsep}{ROOT}"}
        code = subprocess.run(command, cwd=copy, env=env, check=False).returncode
    (folder / "faults.json").write_text(json.dumps([x.name for x in mutants]))
    return code


class ReachedFaults:
    """The results that `collect` wrote to a folder."""

    def __init__(self, root: Path, folder: Path):
        self._root = root
        self.measures: dict[str, Record] = read_measures([folder / MEASURES])
        self._passing = {x for x in self.measures if self.measures[x]["outcome"] == "passed"}
        names = json.loads((folder / "faults.json").read_text())
        self._tests: dict[str, set[str]] = {name: set() for name in names}
        self.names = frozenset(names)
        for path in (folder / "reached").iterdir():
            for line in path.read_text(encoding="utf-8").splitlines():
                number, _, context = line.partition("\t")
                test, _, phase = context.rpartition(" (")
                # A fixture's result may be used by all tests of the file.
                found = {test} if phase == "call)" else self._tests_of([test.partition("::")[0]])
                self._tests[names[int(number)]] |= found & self._passing
        self._num_faults = collections.Counter(
            file
            for tests in self._tests.values()
            for file in {test.partition("::")[0] for test in tests}
        )

    def stages(self, mutant: Mutant) -> list[list[str]]:
        """Returns the tests to run for a fault, in stages; running stops after a detection.

        The first stage contains the tests that reach the changed statement, and the files whose
        fixtures reach it. The second stage contains all tests of these files, because a test may
        use what another test has cached or set up. Tests that failed or were skipped while they
        were recorded are left out. For a statement that runs at import, the first stage contains
        the tests that reach any function of its file and, in a file without functions, the test
        files that contain its name.
        """
        first = self._tests[mutant.name]
        if not first and not mutant.is_in_function:
            name = re.compile(rf"\b{Path(mutant.file).stem}\b")
            files = {test.partition("::")[0] for test in self._passing}
            first = self._tests_of(x for x in files if name.search((self._root / x).read_text()))
        second = self._tests_of(test.partition("::")[0] for test in first) - first
        return [self._by_file(stage) for stage in (first, first | second) if stage]

    def _tests_of(self, files: Iterable[str]) -> set[str]:
        files = {*files}
        return {test for test in self._passing if test.partition("::")[0] in files}

    def seconds(self, test: str) -> float:
        """Returns the duration of a test."""
        return seconds_of(self.measures[test])

    def _by_file(self, tests: Iterable[str]) -> list[str]:
        """Groups tests by file: quick tests before slow tests, then the likeliest files first.

        A file whose tests reach few of the faults is about this code, so it is likely to detect the
        fault. The tests of a file stay in order, because some need the setup of previous tests.
        """
        order = {test: number for number, test in enumerate(self.measures)}
        groups: dict[tuple[bool, str], list[str]] = {}
        for test in sorted(tests, key=order.__getitem__):
            group = (self.measures[test]["slow"], test.partition("::")[0])
            groups.setdefault(group, []).append(test)
        costs = {
            group: (1 + sum(map(self.seconds, tests))) * self._num_faults[group[1]]
            for group, tests in groups.items()
        }
        in_turn = sorted(groups, key=lambda group: (group[0], costs[group], group[1]))
        return [test for group in in_turn for test in groups[group]]


def main(arguments: Sequence[str]) -> int:
    """Runs the tests of this checkout and records what they reach; returns pytest's exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.reached_faults")
    parser.add_argument("folder", type=Path)
    parser.add_argument("files", nargs="*", help="default: all files")
    parser.add_argument("--num", type=int, default=300)
    parser.add_argument("--seed", type=int, default=53)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("-m", dest="marks", help='such as "not slow"')
    args = parser.parse_intermixed_args(arguments)
    marks = ["-m", args.marks] if args.marks else []
    mutants = plant(ROOT, args.num, args.seed)
    return collect(ROOT, args.folder, mutants, args.files, marks, args.workers)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
