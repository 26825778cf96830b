"""CONTRIBUTING.md's first change works, and what it and AGENTS.md name exists."""

import re
import types
from pathlib import Path

import pytest

from praxis_lite.optimizers import schedules
from tests.support.doc_pages import Page

ROOT = Path(__file__).parents[2]
TEXTS = {
    name: (ROOT / name).read_text(encoding="utf-8") for name in ("CONTRIBUTING.md", "AGENTS.md")
}


def test_the_first_change_passes_its_test():
    test, function = Page("CONTRIBUTING.md", TEXTS["CONTRIBUTING.md"]).blocks()
    changed = types.SimpleNamespace(**function.run(dict(vars(schedules))))
    names = test.run({"schedules": changed, "pytest": pytest})
    names["test_inverse_time_is_half_after_the_decay_steps"]()


@pytest.mark.parametrize("page", TEXTS)
def test_every_file_and_link_exists(page):
    folders = r"(?:praxis_lite|praxis_tools|tests|tasks|experiments|benchmarks|docs|\.github)"
    named = re.findall(rf"(?<![\w/])({folders}/[\w./]*\w)", TEXTS[page])
    links = re.findall(r"\]\((?!https?:)([^)#]*)", TEXTS[page])
    # Folders of versions.
    missing = {x for x in (*named, *links) if not (ROOT / x).exists() and "VERSION" not in x}
    assert len(named) > 10 and missing == set()
