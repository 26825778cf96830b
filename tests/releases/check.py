"""Builds the release, installs it in an empty environment, and tries it there.

    python -m tests.releases.check [--tag v1.0.0]

`make release-check` builds the documentation, tests the wheel, and then runs this command. It
writes `dist/`, and prints a line for each step.
"""

import argparse
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import praxis_lite

ROOT = Path(__file__).parents[2]
DIST, WORK = ROOT / "dist", ROOT / "build/release"
VERSION = praxis_lite.__version__
# Licenses without conditions on programs that use the package.
ALLOWED = re.compile(
    r"apache|\bmit\b|bsd|\bisc\b|\bpsf|python software foundation|python-2|mozilla|mpl-2|unlicense"
    r"|\bzlib\b|public domain|cc0",
    re.IGNORECASE,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tag", help="the tag of the release, such as v1.0.0")
    tag = parser.parse_args().tag
    steps: dict[str, Callable[[], str]] = {
        "the version is the same everywhere": lambda: same_version(tag),
        "the wheel and the sdist are built, and their metadata are valid": build,
        "the wheel is installed": install,
        "a job trains and decodes": try_out,
        "the licenses of all dependencies are known": check_licenses,
    }
    for name, step in steps.items():
        start = time.monotonic()
        try:
            result = step()
        except ReleaseError as error:
            sys.exit(f"FAILED: {name}: {error}")
        print(f"passed: {name}: {result} ({time.monotonic() - start:.0f} s)", flush=True)


class ReleaseError(Exception):
    """The release is not ready; the message says what to change."""


def same_version(tag: str | None) -> str:
    """Checks the version in the files that contain it."""
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    dated = rf"^## \[{re.escape(VERSION)}\] - \d{{4}}-\d\d-\d\d$"
    missing = {
        f"CHANGELOG.md has no line '## [{VERSION}] - YYYY-MM-DD'": re.search(
            dated, changelog, re.M
        ),
        f"CITATION.cff has no line 'version: {VERSION}'": f"\nversion: {VERSION}\n" in citation,
        f"tests/releases/{VERSION} is missing: run `make release-job`": (
            ROOT / "tests/releases" / VERSION
        ).is_dir(),
        f"the tag is {tag}, expected v{VERSION}": tag in (None, f"v{VERSION}"),
    }
    if wrong := [message for message, is_there in missing.items() if not is_there]:
        raise ReleaseError(f"praxis_lite.__version__ is {VERSION}, but {'; '.join(wrong)}.")
    return VERSION


def build() -> str:
    """Builds dist/ from a clean folder, and checks it as an index does."""
    shutil.rmtree(DIST, ignore_errors=True)
    python = new_environment(WORK / "tools")
    run([python, "-m", "pip", "install", "-q", "build", "twine"])
    run([python, "-m", "build", "--outdir", str(DIST), str(ROOT)])
    files = sorted(DIST.iterdir())
    run([python, "-m", "twine", "check", "--strict", *map(str, files)])
    return ", ".join(f"{path.name} {path.stat().st_size / 1e6:.2f} MB" for path in files)


def install() -> str:
    """Installs the wheel without extras."""
    (wheel,) = DIST.glob("*.whl")
    python = new_environment(WORK / "installed")
    run([python, "-m", "pip", "install", "-q", str(wheel)])
    run([python, "-m", "pip", "check"])
    size = sum(path.stat().st_size for path in (WORK / "installed").rglob("*") if path.is_file())
    return f"{size / 1e9:.2f} GB"


def try_out() -> str:
    """Trains and decodes in an empty folder, with the installed wheel only."""
    python = WORK / "installed/bin/python"
    with tempfile.TemporaryDirectory() as folder:
        command = [python, "-m", "praxis_lite"]
        # The text has five documents, of which two are held out.
        corpus = ["corpus.files=*.txt", "corpus.heldout_percent=40"]
        settings = ["run.num_train_steps=30", *corpus]
        Path(folder, "a.txt").write_text("".join(f"{n} and {n} is {2 * n}.\n" for n in range(3000)))
        train = [*command, "--exp=lm.PyDocs", "--job_log_dir=job", "--set", *settings]
        run(train, folder)
        lines = Path(folder, "job/metrics.jsonl").read_text().splitlines()
        first, last = (json.loads(line)["loss"] for line in (lines[0], lines[-1]))
        if not last < 0.9 * first:
            raise ReleaseError(f"the loss went from {first:.3f} to {last:.3f} in 30 steps.")
        decode = [*command, "--mode=decode", "--job_log_dir=job", "--prompt", "1 and 1"]
        continued = run(decode, folder)
    return f"loss {first:.2f} to {last:.2f}; decoded {len(continued)} characters"


def check_licenses() -> str:
    """Checks the license of each installed package."""
    (site,) = (WORK / "installed/lib").glob("python*/site-packages")
    found = licenses(importlib.metadata.distributions(path=[str(site)]))
    wrong = {name: text for name, text in found.items() if not ALLOWED.search(text)}
    if wrong:
        raise ReleaseError(
            "these packages have a license that is unknown, or has conditions on programs that "
            f"use them: {wrong}. Read the license; add it to ALLOWED, or remove the package."
        )
    return f"{len(found)} packages"


def licenses(packages: Iterable[importlib.metadata.Distribution]) -> dict[str, str]:
    """Returns the license of each package, as its metadata name it, or "none"."""
    return {package.name: " / ".join(_license_texts(package)) or "none" for package in packages}


def _license_texts(package: importlib.metadata.Distribution) -> Iterator[str]:
    metadata = package.metadata
    if expression := metadata.get("License-Expression"):
        yield expression
    if text := metadata.get("License"):
        # Some packages have the complete text here.
        yield text.strip().partition("\n")[0]
    for classifier in metadata.get_all("Classifier") or ():
        if classifier.startswith("License :: "):
            yield classifier.rpartition(" :: ")[2]


def new_environment(folder: Path) -> Path:
    """Creates an empty virtual environment, and returns its Python."""
    venv.create(folder, clear=True, with_pip=True)
    return folder / "bin/python"


def run(command: list[str | Path], folder: str | Path = WORK) -> str:
    """Runs a command outside of the checkout's folder, and returns its output.

    Raises:
      ReleaseError: The command failed; the message contains the end of its output.
    """
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        words = " ".join(str(part) for part in command)
        raise ReleaseError(f"`{words}` failed:\n{done.stdout[-3000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
