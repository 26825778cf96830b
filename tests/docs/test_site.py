"""mkdocs.yml: the navigation of the site has every page once."""

import re

from tests.support.doc_pages import ROOT
from tests.support.site import reference_pages


def test_every_page_is_in_the_navigation_once():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r"^ +- .*: ([\w/]+\.md)$", text, re.MULTILINE)
    assert len(listed) == len(set(listed))
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    notebooks = {f"notebooks/{path.stem}.md" for path in (ROOT / "docs/notebooks").glob("*.ipynb")}
    reference = {f"reference/{name}.md" for name in reference_pages()}
    of_checkout = {name for name in listed if (ROOT / name).is_file()}
    assert set(listed) - of_checkout == pages | notebooks | reference
