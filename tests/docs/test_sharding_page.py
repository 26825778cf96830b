"""Every Python block of docs/sharding.md runs as it stands, a section's one after another."""

import re
from pathlib import Path

import jax
import pytest

PAGE = (Path(__file__).parents[2] / "docs/sharding.md").read_text(encoding="utf-8")
SECTIONS = {
    title: re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for title, _, text in (part.partition("\n") for part in re.split(r"^## ", PAGE, flags=re.M)[1:])
}


@pytest.mark.parametrize("title", [title for title, blocks in SECTIONS.items() if blocks])
def test_the_blocks_of_a_section_run(title, monkeypatch):
    # The devices of the tests are there already.
    monkeypatch.setattr("praxis_lite.core.simulate_devices", lambda num_devices: None)
    names = {"__name__": "sharding_page"}
    for block in SECTIONS[title]:
        with jax.numpy_rank_promotion("allow"):  # As it is for whoever reads the page.
            exec(compile(block, f"docs/sharding.md, {title}", "exec"), names)


def test_every_link_within_the_page_has_its_heading():
    anchors = {
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^#+ (.*)$", PAGE, re.M)
    }
    assert set(re.findall(r"\]\(#(.*?)\)", PAGE)) <= anchors
