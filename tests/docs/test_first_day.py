"""docs/first_day.md has the rows of benchmarks/first_day.py, which runs each of them."""

import importlib
import re

import pytest

from tests.support.doc_pages import page
from tests.support.job_runs import CHECKOUT


@pytest.fixture
def first_day(monkeypatch):
    monkeypatch.syspath_prepend(CHECKOUT / "benchmarks")
    return importlib.import_module("first_day")


def test_the_page_has_each_row_and_its_seconds(first_day):
    rows = [f"| {row.want} | {first_day.shown(row)} |" for row in first_day.ROWS]
    assert len(rows) >= 30
    text = page("first_day").text
    lines = [line for line in text.splitlines() if line.startswith("| ") and "`" in line]
    cells = [re.fullmatch(r"(\| .* \|) (-|\d+ \(\d+\)) \|", line) for line in lines]
    assert all(cells) and [cell[1] for cell in cells] == rows


@pytest.mark.slow
def test_rows_that_need_no_others_run_as_they_stand(first_day, tmp_path):
    wanted = {"list the experiments", "train a tokenizer", "start from the weights of a Pax job"}
    rows = [row for row in first_day.ROWS if row.want in wanted]
    assert len(rows) == len(wanted)
    first_day.first_day_files.write(tmp_path)
    for row in rows:
        assert first_day.seconds(row, tmp_path) != "-", row.want
