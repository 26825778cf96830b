"""A pytest plugin that runs chosen tests in a given order and records each result immediately.

    python -m pytest -p tests.support.chosen_tests --chosen=FILE.json TEST_FILE ...

FILE.json contains the names of the tests, the time at which to stop (time.time), whether to stop
after the first failure, and the output file. A line is written when a test starts and when it ends,
so that a test that kills the process can be identified.
"""

import json
import time
from pathlib import Path

import pytest


def pytest_addoption(parser):
    parser.addoption("--chosen", metavar="FILE.json")


def pytest_configure(config):
    if file := config.getoption("chosen"):
        config.pluginmanager.register(ChosenTests(**json.loads(Path(file).read_text())))
        # If a fault uses all memory, the kernel should kill this process first.
        Path("/proc/self/oom_score_adj").write_text("1000")


class ChosenTests:
    """Selects the tests, stops at a given time, and writes the lines."""

    def __init__(self, tests: list[str], stop_at: float, only_first: bool, events: str):
        self._order = {test: number for number, test in enumerate(tests)}
        self._stop_at, self._only_first, self._events = stop_at, only_first, Path(events)
        self._has_failed = False

    def _write(self, test: str, event: str):
        with self._events.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps([test, event])}\n")

    # Run after the hook in tests/conftest.py, which sorts the tests.
    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items):
        chosen = [item for item in items if item.nodeid in self._order]
        config.hook.pytest_deselected(items=[x for x in items if x.nodeid not in self._order])
        items[:] = sorted(chosen, key=lambda item: self._order[item.nodeid])

    def pytest_collectreport(self, report):
        if report.failed:
            self._write(report.nodeid, "failed")

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self._has_failed = True
            self._write(report.nodeid, "failed")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self._write(item.nodeid, "started")
        result = yield
        self._write(item.nodeid, "ended")
        if time.time() > self._stop_at or (self._only_first and self._has_failed):
            item.session.shouldstop = "the time is over, or a test has failed"
        return result
