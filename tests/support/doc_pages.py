"""Runs the code blocks and commands in pages of the docs.

A block is compiled with the file name and line numbers of its page, so tracebacks show both.
"""

import dataclasses
import functools
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# As in Markdown, the closing fence has the same indentation as the opening fence.
FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced code block.

    Attributes:
      page: Path of the page, relative to the checkout.
      number: Index of the block among the page's blocks in the same language, from 1.
      line: Line number of the first line of the text.
      language: The word after the opening fence, or "".
      text: Content of the block.
    """

    page: str
    number: int
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}, {self.language} block {self.number}, line {self.line}"

    def run(
        self, names: dict[str, Any] | None = None, changed: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Executes the block in the namespace `names` and returns it.

        Args:
          names: The namespace.
          changed: Maps texts in the block to their replacements.
        """
        names = {"__name__": "page"} if names is None else names
        text = self.text
        for old, new in (changed or {}).items():
            assert old in text, f"{self} has no {old!r}"
            text = text.replace(old, new)
        try:
            exec(compile("\n" * (self.line - 1) + text, ROOT / self.page, "exec"), names)
        except BaseException as error:
            error.add_note(str(self))
            raise
        return names


@dataclasses.dataclass(frozen=True)
class Page:
    """A page of the docs.

    Attributes:
      name: Path relative to the checkout.
      text: Content of the page.
    """

    name: str
    text: str

    def blocks(self, language: str = "python") -> list[Block]:
        """Returns the page's blocks in a language, in order."""
        found = [match for match in FENCED.finditer(self.text) if match[2] == language]
        lines = [self.text[: match.start(3)].count("\n") + 1 for match in found]
        return [
            Block(self.name, number, line, language, match[3])
            for number, (line, match) in enumerate(zip(lines, found, strict=True), 1)
        ]

    def files(self, *languages: str) -> dict[str, Block]:
        """Returns the blocks that start with a comment containing a file name, by this name."""
        blocks = [block for language in languages or ("python",) for block in self.blocks(language)]
        named = {re.match(r"# ([\w/.]+\.\w+)\n", block.text): block for block in blocks}
        return {match[1]: block for match, block in named.items() if match}

    def sections(self) -> dict[str, list[Block]]:
        """Returns the Python blocks by the second-level heading above them."""
        headings = list(re.finditer(r"^## (.*)$", self.text, re.MULTILINE))
        lines = [self.text[: match.start()].count("\n") + 1 for match in headings]
        result: dict[str, list[Block]] = {}
        for block in self.blocks():
            above = [
                match[1] for match, line in zip(headings, lines, strict=True) if line < block.line
            ]
            result.setdefault(above[-1] if above else "", []).append(block)
        return result

    def commands(self, beginning: str) -> list[list[str]]:
        """Returns the arguments of each command line with this prefix, without comments."""
        lines = [line.strip() for line in self.text.replace("\\\n", " ").splitlines()]
        skipped = len(beginning.split())
        return [
            shlex.split(line, comments=True)[skipped:]
            for line in lines
            if f"{line} ".startswith(f"{beginning} ")
        ]


@functools.cache
def page(name: str) -> Page:
    """Returns a page by its name in `docs/` without the suffix, or README."""
    path = f"{name}.md" if name == "README" else f"docs/{name}.md"
    return Page(path, (ROOT / path).read_text(encoding="utf-8"))


def pages() -> list[Page]:
    """Returns README and all pages in `docs/`."""
    return [page("README"), *(page(path.stem) for path in sorted((ROOT / "docs").glob("*.md")))]
