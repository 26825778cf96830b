"""A save of two processes that is cancelled by a signal to both, or to one alone."""

import json
import subprocess
import sys

import pytest

from tests.support import process_pairs as pairs
from tests.support.job_runs import CHECKOUT


@pytest.mark.slow
@pytest.mark.parametrize(
    "interrupted", ["1", *(pytest.param(who, marks=pytest.mark.nightly) for who in ("0", "01"))]
)
def test_a_signal_cancels_the_save_of_two_processes_and_nothing_is_left(tmp_path, interrupted):
    command = [
        sys.executable,
        "-m",
        "tests.support.cancelled_saves",
        f"127.0.0.1:{pairs.free_port()}",
    ]
    pairs.ended(
        [
            subprocess.Popen(
                [*command, str(k), str(tmp_path), interrupted],
                cwd=CHECKOUT,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for k in range(2)
        ]
    )
    seen = [json.loads((tmp_path / f"{k}.json").read_text()) for k in range(2)]
    for k in range(2):
        assert seen[k]["seconds"] < 30, seen  # Of the minute that the write would take.
        assert seen[k]["steps"] == ["3"], seen
        told = " ".join([*seen[k]["told"], seen[k]["error"]])
        assert "The newest checkpoint is of step 3" in told, seen
        if str(k) in interrupted:
            assert seen[k]["error"].startswith("KeyboardInterrupt"), seen
        else:
            assert "The checkpoint of step 7 could not be saved: process" in told, seen
            assert "cancelled" in told, seen
    assert (tmp_path / "steps/9/commit.json").is_file()
