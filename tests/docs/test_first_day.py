"""docs/first_day.md has the rows of benchmarks/first_day.py, which runs each of them."""

import re
import subprocess
import sys

import pytest

from tests.support.job_runs import CHECKOUT

PAGE = (CHECKOUT / "docs/first_day.md").read_text(encoding="utf-8")
PRINTS = """
import sys
sys.path.insert(0, "benchmarks")
import first_day
for row in first_day.ROWS:
    print(f"| {row.want} | {first_day.shown(row)} |")
"""


def test_the_page_has_each_row_and_its_seconds():
    done = subprocess.run(
        [sys.executable, "-c", PRINTS], cwd=CHECKOUT, capture_output=True, text=True, check=True
    )
    rows = done.stdout.splitlines()
    assert len(rows) >= 30
    lines = [line for line in PAGE.splitlines() if line.startswith("| ") and "`" in line]
    cells = [re.fullmatch(r"(\| .* \|) (-|\d+ \(\d+\)) \|", line) for line in lines]
    assert all(cells) and [cell[1] for cell in cells] == rows


@pytest.mark.slow
def test_rows_that_need_no_others_run_as_they_stand(tmp_path):
    folder = tmp_path / "files"
    for words in ("the experiments", "a tokenizer", "the weights of a Pax job"):
        done = subprocess.run(
            [sys.executable, "benchmarks/first_day.py", f"--folder={folder}", f"--only={words}"],
            cwd=CHECKOUT, capture_output=True, text=True,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("\n| ") == 2, "the head and the row"
