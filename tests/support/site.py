"""Builds the site of the docs in build/site: `make docs`.

The pages of the site are the pages in docs/ and the files that they link to, the reference of all
public names, the notebooks with their outputs, and the pages that the commands in docs/gallery.md
write. They are collected in build/docs, from which zensical builds the site as mkdocs.yml says.

With --version=1.0.0, build/versions/1.0.0 is a copy of the site, and readers of the sites in
build/versions can choose between versions.
"""

import argparse
import importlib
import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from packaging.version import Version

from praxis_lite.public_names import PACKAGES
from tests.support import api_page
from tests.support.doc_pages import page

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "mkdocs.yml"
# The first page of the checkout; that of the site is docs/index.md.
README = ROOT / "README.md"
PAGES, SITE, VERSIONS = ROOT / "build/docs", ROOT / "build/site", ROOT / "build/versions"
# The packages as they are installed, for mkdocstrings.
PACKAGES_DIR = ROOT / "build/packages"
COLOR = re.compile(r"\x1b\[[\d;]*m")
# The target of a Markdown link, without its anchor.
LINK = re.compile(r"(?<=\]\()([^)#\s]+)(?=(?:#[^)\s]*)?\))")
# The text of a link that shows the name of a page.
PAGE_NAME = re.compile(r"(?<=\[)(?:docs/)?([\w/]+\.md)(?=\]\()")
# The badge of a link to Colab. Its image is on another host; the site shows a button.
BADGE = re.compile(r"\[!\[(Open in Colab)\]\([^)]*\)\](\(\S*\))")


def main() -> int:
    """Collects the pages and builds the site."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--version", help="also copy the site to build/versions/VERSION")
    parser.add_argument("--no-runs", action="store_true", help="keep the pages that programs wrote")
    args = parser.parse_args()
    if not args.no_runs:
        shutil.rmtree(PAGES, ignore_errors=True)
        write_gallery()
        write_notebooks()
    copy_pages()
    write_reference()
    os.environ["VERSION_PROVIDER"] = "mike" if args.version else "none"
    build()
    if args.version:
        add_version(args.version)
    print(f"Open {SITE / 'index.html'}")
    return 0


def copy_pages() -> None:
    """Copies docs/ and, recursively, the files in the checkout that these link to.

    A file in docs/ is copied to the top of the site, and any other file to its path in the
    checkout. Links are changed accordingly.
    """
    todo, copied = sorted((ROOT / "docs").rglob("*.*")), set()
    while todo:
        source = todo.pop()
        is_page = source.is_file() and source.suffix != ".ipynb" and source != README
        if source in copied or not is_page:
            continue
        copied.add(source)
        copy = PAGES / in_site(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix != ".md":
            shutil.copyfile(source, copy)
            continue
        text = source.read_text(encoding="utf-8")
        linked = [source.parent / link for link in LINK.findall(text) if "://" not in link]
        todo += [path.resolve() for path in linked]
        copy.write_text(with_site_links(text, source), encoding="utf-8")


def with_site_links(text: str, source: Path) -> str:
    """Returns a page whose links to files in the checkout are links to their copies.

    Links that show the name of a page, such as training.md, show its title instead.
    """

    def moved(link: re.Match[str]) -> str:
        target = (source.parent / link[0]).resolve()
        if "://" in link[0] or not target.is_file():
            return link[0]
        return Path(os.path.relpath(in_site(target), in_site(source).parent)).as_posix()

    navigation = re.findall(r"- (.*): ([\w/]+\.md)$", CONFIG.read_text("utf-8"), re.MULTILINE)
    titles = {name: title for title, name in navigation}
    text = PAGE_NAME.sub(lambda name: titles.get(name[1], name[0]), text)
    return LINK.sub(moved, text)


def in_site(source: Path) -> Path:
    """Returns the path in build/docs of a file in the checkout."""
    path = source.relative_to(ROOT)
    if source == README:
        return Path("index.md")
    path = path.relative_to("docs") if path.parts[0] == "docs" else path
    return path.with_suffix(".md") if path.suffix == ".ipynb" else path


def write_reference() -> None:
    """Writes a page per group of packages, with each public name, and links them from api.md."""
    shutil.rmtree(PACKAGES_DIR, ignore_errors=True)
    (PACKAGES_DIR / "praxis_lite").mkdir(parents=True)
    (PACKAGES_DIR / "praxis_tools").symlink_to(ROOT / "praxis_tools")
    for path in (*(ROOT / "praxis_lite").iterdir(), ROOT / "tasks", ROOT / "experiments"):
        (PACKAGES_DIR / "praxis_lite" / path.name).symlink_to(path)
    for name, packages in reference_pages().items():
        text = "\n".join(section(package) for package in packages)
        # The heading of an only package is the title.
        text = text[1:] if len(packages) == 1 else f"# {name}\n\n{text}"
        path = PAGES / f"reference/{name}.md"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    api = with_site_links(linked_api(), api_page.PAGE)
    (PAGES / "api.md").write_text(api, encoding="utf-8")


def reference_pages() -> dict[str, list[str]]:
    """Returns the packages of each page of the reference."""
    pages: dict[str, list[str]] = {}
    for package in PACKAGES:
        parts = package.split(".")
        first = parts[1] if len(parts) > 1 and parts[0] == "praxis_lite" else parts[0]
        pages.setdefault(first, []).append(package)
    return pages


def section(package: str) -> str:
    """Returns the Markdown of a package's names, which mkdocstrings replaces by docstrings."""
    module = importlib.import_module(package)
    lines = [f"## {package} {{ #{package} }}", "", inspect.cleandoc(module.__doc__ or ""), ""]
    for name, value in api_page.public_values(package):
        if inspect.ismodule(value):
            continue
        lines += [f"::: {package}.{name}", ""]
        if not inspect.getdoc(value) or not callable(value):
            lines += [api_page.summary_of(package, name, value), ""]
    return "\n".join(lines)


def linked_api() -> str:
    """Returns docs/api.md with a link from each name to its docstring."""
    page_of = {package: name for name, names in reference_pages().items() for package in names}
    lines, package = [], ""
    for line in api_page.page().splitlines():
        package = line.removeprefix("## ") if line.startswith("## ") else package
        match = re.match(r"- `(\w+)", line)
        if match and package in page_of:
            anchor = f"reference/{page_of[package]}.md#{package}.{match[1]}"
            line = re.sub(r"`([^`]+)`", rf"[`\1`]({anchor})", line, count=1)
        lines.append(line)
    return "\n".join(lines)


def write_gallery() -> None:
    """Runs the commands of docs/gallery.md, whose pages the gallery shows."""
    folder = PAGES / "gallery"
    folder.mkdir(parents=True)
    for command in page("gallery").commands("praxis"):
        run(sys.executable, "-m", "praxis_lite", *command, cwd=folder)
    for job in folder.glob("*/"):
        shutil.rmtree(job)


def write_notebooks() -> None:
    """Runs the notebooks, and writes each as a page with its outputs."""
    import nbformat  # Packages of the extra `docs`, which tests do not have.
    from nbclient import NotebookClient

    (PAGES / "notebooks").mkdir()
    for source in sorted((ROOT / "docs/notebooks").glob("*.ipynb")):
        notebook = nbformat.read(source, as_version=4)
        with tempfile.TemporaryDirectory() as folder:
            resources = {"metadata": {"path": folder}}
            NotebookClient(notebook, timeout=900, resources=resources).execute()
        copy = PAGES / in_site(source)
        text = "\n\n".join(
            cell_text(cell, copy.with_name(f"{source.stem}_{number}.html"))
            for number, cell in enumerate(notebook.cells)
        )
        copy.write_text(with_site_links(text, source), encoding="utf-8")


def cell_text(cell: Any, html: Path) -> str:
    """Returns a cell and its outputs as Markdown; output in HTML is written to a file."""
    if cell.cell_type == "markdown":
        # Jupyter's anchors have the capitals of their headings.
        text = re.sub(r"(?<=\]\()#[^)]*", lambda match: match[0].lower(), cell.source)
        return BADGE.sub(r"[\1]\2{ .md-button }", text)
    parts = [f"```python\n{cell.source}\n```"]
    for output in cell.outputs:
        data = output.get("data", {})
        if "text/html" in data:
            html.write_text(data["text/html"], encoding="utf-8")
            parts.append(f'<iframe class="gallery" src="{html.name}" title="output"></iframe>')
        elif output.output_type != "stream" or output.name == "stdout":
            parts.append(f"```text\n{output.get('text') or data['text/plain']}\n```")
    return "\n\n".join(parts)


def build() -> None:
    """Builds the site; a warning is an error."""
    shutil.rmtree(SITE, ignore_errors=True)
    zensical = Path(sys.executable).with_name("zensical")
    out = run(zensical, "build", "--clean", "--strict", f"--config-file={CONFIG}")
    if "warning" in out.lower():
        sys.exit(f"{out}\nThe build of the site has warnings.")
    missing = [
        f"{package}.{name}"
        for title, packages in reference_pages().items()
        for html in [(SITE / f"reference/{title}.html").read_text(encoding="utf-8")]
        for package in packages
        for name, value in api_page.public_values(package)
        if not inspect.ismodule(value) and f'id="{package}.{name}"' not in html
    ]
    if missing:
        sys.exit(f"The reference lacks {', '.join(missing)}.")


def add_version(version: str) -> None:
    """Copies the site to build/versions, among whose versions a reader chooses."""
    shutil.copytree(SITE, VERSIONS / version, dirs_exist_ok=True)
    names = [path.parent.name for path in VERSIONS.glob("*/index.html")]
    names.sort(key=Version, reverse=True)
    listed = [
        {"version": name, "title": name, "aliases": ["latest"] if name == names[0] else []}
        for name in names
    ]
    (VERSIONS / "versions.json").write_text(json.dumps(listed), encoding="utf-8")
    first = f'<meta http-equiv="refresh" content="0; url={names[0]}/index.html">'
    (VERSIONS / "index.html").write_text(first, encoding="utf-8")


def run(*command: object, cwd: Path = ROOT) -> str:
    """Runs a command of this checkout and returns its output, which is shown if it fails."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": paths},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    out = COLOR.sub("", done.stdout)
    if done.returncode:
        sys.exit(f"{out}\n{shlex.join(map(str, command))} failed.")
    return out


if __name__ == "__main__":
    sys.exit(main())
