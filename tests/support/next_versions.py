"""The quick tests on the newest libraries, with what JAX and Flax are going to make the default.

`make test-next` calls it: python -m tests.support.next_versions [arguments of pytest]. It prints
what pytest does, then a table of the libraries, how many tests passed and failed, and each that
fails: with the settings below alone, or on the new versions without them, too. Tests that a known
defect of JAX fails, and say so, are counted as known: docs/versions.md.
"""

import collections
import dataclasses
import importlib.metadata
import os
import re
import runpy
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from unittest import mock

import setuptools

from praxis_lite.host.text_table import table_lines

ROOT = Path(__file__).parents[2]
LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")
# New forms of jax.checkpoint, jax.custom_vjp and jax.custom_jvp; NNX modules as trees, not graphs.
NEXT = {
    "JAX_REMAT3": "1",
    "JAX_CUSTOM_VJP3": "1",
    "JAX_CUSTOM_JVP3": "1",
    "NNX_GRAPH_MODE": "0",
    "NNX_GRAPH_UPDATES": "0",
}


def allowed(library: str) -> str:
    """Returns the versions of a library that setup.py allows: "0.10.2 to below 0.13"."""
    with mock.patch.object(setuptools, "setup") as setup:
        runpy.run_path(str(ROOT / "setup.py"))
    requirements = setup.call_args.kwargs["install_requires"]
    pattern = rf"{library}>=([\d.]+),<([\d.]+)"
    matches = [match for item in requirements if (match := re.fullmatch(pattern, item))]
    return "{} to below {}".format(*matches[0].groups()) if matches else "as jax has it"


@dataclasses.dataclass(frozen=True)
class Results:
    """How tests ended.

    Attributes:
      failed: the names of those that failed, each with the first line of its error.
      numbers: "6973 passed, 7 failed, 1 skipped, 2 known to fail".
    """

    failed: dict[str, str]
    numbers: str


def results(arguments: list[str], settings: dict[str, str]) -> Results | None:
    """Returns how the quick tests end with settings; None if none ran."""
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
        # Of a file that cannot be imported there is but a name with dots.
        file = case.get("file") or f"{case.get('name').replace('.', '/')}.py"
        name = f"{file}::{case.get('name')}" if case.get("file") else file
        failed[name] = (problem.get("message") or "").strip().partition("\n")[0][:120]
    kinds = ("passed", "failed", "skipped", "known to fail")
    return Results(failed, ", ".join(f"{num[x]} {x}" for x in kinds)) if cases else None


def main(arguments: list[str]) -> int:
    """Runs the tests, and those that fail once more without the settings; returns 1 if any do."""
    with_settings = results(arguments, NEXT)
    failed = list(with_settings.failed) if with_settings else []
    without = results(failed, {}) if failed else None
    versions = [["library", "setup.py allows", "installed"]]
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
        print("No test ran: pytest says why above.")
        return 1
    print(with_settings.numbers)
    if not with_settings.failed:
        print("Nothing has moved: no test fails.")
        return 0
    broken = without.failed if without else {}
    of_settings = "The settings break" if without else "Fail, and without the settings none ran"
    for title, names in {
        "New versions break, with the settings and without": sorted(broken),
        of_settings: sorted(with_settings.failed.keys() - broken.keys()),
    }.items():
        if names:
            print(f"{title}, {len(names)} tests:")
            print(*(f"  {name}\n    {with_settings.failed[name]}" for name in names), sep="\n")
    print("Mend them, or write them down in docs/versions.md.")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
