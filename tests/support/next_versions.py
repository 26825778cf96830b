"""The quick tests on the newest libraries, with what JAX and Flax are going to make the default.

`make test-next` calls it: python -m tests.support.next_versions [arguments of pytest]. It prints a
table of the libraries, and each test that fails: only with the settings below, or without, too.
"""

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

from praxis_lite.run.text_table import table_lines

ROOT = Path(__file__).parents[2]
LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")
# New forms of jax.checkpoint, jax.custom_vjp and jax.custom_jvp; NNX modules as trees, not graphs.
NEXT = {
    "JAX_REMAT3": "1", "JAX_CUSTOM_VJP3": "1", "JAX_CUSTOM_JVP3": "1",
    "NNX_GRAPH_MODE": "0", "NNX_GRAPH_UPDATES": "0",
}


def allowed(library: str) -> str:
    """Returns the versions of a library that setup.py allows: "0.10.2 to below 0.13"."""
    with mock.patch.object(setuptools, "setup") as setup:
        runpy.run_path(str(ROOT / "setup.py"))
    requirements = setup.call_args.kwargs["install_requires"]
    pattern = rf"{library}>=([\d.]+),<([\d.]+)"
    matches = [match for item in requirements if (match := re.fullmatch(pattern, item))]
    return "{} to below {}".format(*matches[0].groups()) if matches else "as jax has it"


def failures(arguments: list[str], settings: dict[str, str]) -> dict[str, str] | None:
    """Returns the tests that fail, each with the first line of its error; None if none ran."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        env = {name: x for name, x in os.environ.items() if name not in NEXT} | settings
        command = [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow",
            "--tb=short", "-o", "junit_family=xunit1", f"--junitxml={report}", *arguments,
        ]
        subprocess.run(command, check=False, env=env, cwd=ROOT)
        if not report.exists():
            return None
        cases = list(ElementTree.parse(report).iter("testcase"))
    failed = {}
    for case in cases:
        for problem in (*case.iter("failure"), *case.iter("error")):
            # Of a file that cannot be imported there is but a name with dots.
            file = case.get("file") or f"{case.get('name').replace('.', '/')}.py"
            name = f"{file}::{case.get('name')}" if case.get("file") else file
            failed[name] = (problem.get("message") or "").strip().partition("\n")[0][:120]
    return failed if cases else None


def main(arguments: list[str]) -> int:
    """Runs the tests, and those that fail once more without the settings; returns 1 if any do."""
    with_settings = failures(arguments, NEXT)
    versions = [["library", "setup.py allows", "installed"]]
    versions += [[x, allowed(x), importlib.metadata.version(x)] for x in LIBRARIES]
    print("", f"Python {sys.version.split()[0]}; {' '.join(f'{k}={v}' for k, v in NEXT.items())}",
          *table_lines(versions), sep="\n")
    if with_settings is None:
        print("No test ran.")
        return 1
    if not with_settings:
        print("Nothing has moved: no test fails.")
        return 0
    options = [x for x in arguments if x.startswith("-") and not x.startswith(("-n", "-k"))]
    without = failures([*with_settings, *options], {}) or {}
    for title, names in {
        "New versions break": sorted(without),
        "The settings break": sorted(with_settings.keys() - without.keys()),
    }.items():
        if names:
            print(f"{title} {len(names)} tests:")
            print(*(f"  {name}: {with_settings[name]}" for name in names), sep="\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
