"""Opens ten pages of the site at two widths, and saves pictures: `make docs-pictures`.

Fails if a page is wider than the screen, loads something from another host, or logs an error.
"""

import sys

from tests.support.browser import EXECUTABLE, NO_BROWSER, Browser
from tests.support.site import ROOT, SITE

PICTURES = ROOT / "build/pictures"
PAGES = (
    "index",
    "get_started",
    "first_day",
    "gallery",
    "notebooks/own_model",
    "training",
    "coming_from_pax",
    "api",
    "reference/praxis_lite",
    "CONTRIBUTING",
)
WIDTHS = (1280, 390)
# A heading in docs/training.md, and whether the results of a search have it.
SEARCHED = "Schedule-free AdamW"
IS_FOUND = f"""[...document.querySelectorAll('*')].some(
  e => e.shadowRoot && e.shadowRoot.textContent.includes('{SEARCHED}'))"""
# Elements that reach over the right edge of the page.
OVERFLOW = """[...document.querySelectorAll('.md-content *')]
  .filter(e => e.getBoundingClientRect().right > innerWidth + 1)
  .filter(e => !e.closest('.md-typeset__scrollwrap, pre, .arithmatex'))
  .slice(0, 3).map(e => e.outerHTML.slice(0, 90))"""


def main() -> int:
    """Returns the number of pages with complaints."""
    if EXECUTABLE is None:
        sys.exit(NO_BROWSER)
    PICTURES.mkdir(parents=True, exist_ok=True)
    failed = 0
    for width in WIDTHS:
        browser = Browser((SITE / "concepts.html").as_uri(), width=width)
        for name in PAGES:
            browser.complaints.clear()
            browser.requests.clear()
            browser.open((SITE / f"{name}.html").as_uri())
            browser.screenshot(PICTURES / f"{name.replace('/', '_')}_{width}.png")
            if name == "index":  # The files have no server: the index is loaded as a script.
                browser.run("document.querySelector('.md-search__button').click()")
                browser.type(SEARCHED)
                browser.wait(IS_FOUND)
                browser.screenshot(PICTURES / f"search_{width}.png")
            complaints = [*browser.complaints, *browser.run(OVERFLOW)]
            complaints += [url for url in browser.requests if url.startswith("http")]
            if browser.run("document.documentElement.scrollWidth > innerWidth"):
                complaints.append("The page is wider than the screen.")
            failed += bool(complaints)
            print(f"{width} {name}: {'; '.join(complaints) or 'ok'}")
        browser.close()
    print(f"The pictures are in {PICTURES}.")
    return failed


if __name__ == "__main__":
    sys.exit(main())
