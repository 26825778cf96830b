"""Hostile checkpoints: cases that other tests hold, run and counted here."""

import re
import subprocess
import sys
from pathlib import Path

from tests.faults.outcome import Row
from tests.faults.zoo import CHECKOUT


def run() -> list[Row]:
    """Returns a row for the checkpoints."""
    from tests.run.checkpoints.hostile_steps import CASES

    return [
        _row("hostile checkpoints: no escape, no abort", len(CASES),
             Path("tests/run/checkpoints/test_hostile.py")),
    ]


def _row(what: str, num_cases: int, file: Path) -> Row:
    """Returns a row of as many cases; each test that fails is a failure of one at least."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rf", "-p", "no:cacheprovider", str(file)],
        cwd=CHECKOUT, capture_output=True, text=True,
    )
    failures = re.findall(r"^(?:FAILED|ERROR) .*", done.stdout, flags=re.M)
    if done.returncode and not failures:
        failures = [done.stdout[-500:] + done.stderr[-500:]]
    passed = re.search(r"(\d+) passed", done.stdout)
    return Row(what, num_cases, {"tests passed": int(passed[1]) if passed else 0}, failures)
