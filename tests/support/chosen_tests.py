"""A pytest plugin that runs chosen tests in a given order, and notes how each ends at once.

    python -m pytest -p tests.support.chosen_tests --chosen=FILE.json TEST_FILE ...

FILE.json has the names of the tests, when to stop (time.time) and where to write. Each test gets a
line when it starts and when it ends, so that one which ends the process is known, too.
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
        # Of all processes the kernel should end this one, if a fault fills the memory.
        Path("/proc/self/oom_score_adj").write_text("1000")


class ChosenTests:
    """Selects the tests, stops after a time, and writes the lines."""

    def __init__(self, tests: list[str], stop_at: float, events: str):
        self._order = {test: number for number, test in enumerate(tests)}
        self._stop_at, self._events = stop_at, Path(events)

    def _write(self, test: str, event: str):
        with self._events.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps([test, event])}\n")

    # After the hook of tests/conftest.py, which sorts them.
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
            self._write(report.nodeid, "failed")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self._write(item.nodeid, "started")
        result = yield
        self._write(item.nodeid, "ended")
        if time.time() > self._stop_at:
            item.session.shouldstop = "the time is over"
        return result
