"""Runs the quick tests with the newest libraries and the future defaults of JAX and Flax.

`make test-next` runs: python -m tests.support.next_versions [pytest arguments]. The script prints
pytest's output, a table of library versions, the numbers of passed and failed tests, and each
failed test: whether it fails only with the settings below, or also without them. Tests that are
marked as failing because of a known JAX bug are counted as known; see docs/versions.md.
"""

import collections
import dataclasses
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from praxis_lite.host.text_table import table_lines

ROOT = Path(__file__).parents[2]
LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")
# New implementations of jax.checkpoint, custom_vjp and custom_jvp; NNX modules as trees.
NEXT = {
    "JAX_REMAT3": "1",
    "JAX_CUSTOM_VJP3": "1",
    "JAX_CUSTOM_JVP3": "1",
    "NNX_GRAPH_MODE": "0",
    "NNX_GRAPH_UPDATES": "0",
}


def allowed(library: str) -> str:
    """Returns the versions of a library that pyproject.toml allows, such as ">=0.10.2,<0.13"."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = [*project["dependencies"], *project["optional-dependencies"]["grain"]]
    ranges = [item.removeprefix(library) for item in requirements if item.startswith(library)]
    return next((item for item in ranges if item[0] == ">"), "as jax has it")


@dataclasses.dataclass(frozen=True)
class Results:
    """The results of the tests.

    Attributes:
      failed: The first line of each failed test's error, by the test's name.
      numbers: A summary, such as "6973 passed, 7 failed, 1 skipped, 2 known to fail".
    """

    failed: dict[str, str]
    numbers: str


def results(arguments: list[str], settings: dict[str, str]) -> Results | None:
    """Runs the quick tests with settings, and returns the results, or None if no test ran."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        env = {name: x for name, x in os.environ.items() if name not in NEXT} | settings
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-m",
            "not slow and not nightly",
            "--tb=short",
            "-o",
            "junit_family=xunit1",
            f"--junitxml={report}",
            *arguments,
        ]
        subprocess.run(command, check=False, env=env, cwd=ROOT)
        if not report.exists():
            return None
        cases = list(ElementTree.parse(report).iter("testcase"))
    failed, num = {}, collections.Counter()
    for case in cases:
        kinds = {item.tag: item for item in case if item.tag in ("failure", "error", "skipped")}
        problem = kinds.get("failure", kinds.get("error"))
        if problem is None:
            skipped = kinds.get("skipped")
            is_known = skipped is not None and skipped.get("type") == "pytest.xfail"
            num["known to fail" if is_known else "passed" if skipped is None else "skipped"] += 1
            continue
        num["failed"] += 1
        # For a file that cannot be imported, there is only a dotted name.
        file = case.get("file") or f"{case.get('name').replace('.', '/')}.py"
        name = f"{file}::{case.get('name')}" if case.get("file") else file
        failed[name] = (problem.get("message") or "").strip().partition("\n")[0][:120]
    kinds = ("passed", "failed", "skipped", "known to fail")
    return Results(failed, ", ".join(f"{num[x]} {x}" for x in kinds)) if cases else None


def main(arguments: list[str]) -> int:
    """Runs the tests, and reruns failed tests without the settings; returns 1 if any failed."""
    with_settings = results(arguments, NEXT)
    failed = list(with_settings.failed) if with_settings else []
    without = results(failed, {}) if failed else None
    versions = [["library", "pyproject.toml allows", "installed"]]
    versions += [[x, allowed(x), importlib.metadata.version(x)] for x in LIBRARIES]
    print(
        "",
        "what moved",
        f"Python {sys.version.split()[0]}",
        *table_lines(versions),
        "",
        f"with {' '.join(f'{k}={v}' for k, v in NEXT.items())}:",
        sep="\n",
    )
    if with_settings is None:
        print("No test ran; see pytest's output above.")
        return 1
    print(with_settings.numbers)
    if not with_settings.failed:
        print("No test fails.")
        return 0
    broken = without.failed if without else {}
    of_settings = "The settings break" if without else "Fail, and without the settings none ran"
    for title, names in {
        "Fail on the new versions, with and without the settings": sorted(broken),
        of_settings: sorted(with_settings.failed.keys() - broken.keys()),
    }.items():
        if names:
            print(f"{title}, {len(names)} tests:")
            print(*(f"  {name}\n    {with_settings.failed[name]}" for name in names), sep="\n")
    print("Fix them, or document them in docs/versions.md.")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
