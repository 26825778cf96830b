"""Adds to pyproject.toml: the packages outside praxis_lite/, and README.md with absolute links."""

import re
import tomllib
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def readme() -> str:
    """Returns README.md with absolute links; package indexes do not resolve relative ones."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    url = PROJECT["urls"]["Repository"]
    text = re.sub(r"(!\[[^\]]*\]\()(?!https?:)", rf"\1{url}/raw/main/", text)
    return re.sub(r"(?<!!)(\[[^\]]*\]\()(?!https?:|#)", rf"\1{url}/blob/main/", text)


setup(
    # tasks/ and experiments/ are at the top of a checkout, and are installed inside praxis_lite.
    packages=[
        *find_packages(include=["praxis_lite", "praxis_lite.*", "praxis_tools", "praxis_tools.*"]),
        "praxis_lite.tasks",
        "praxis_lite.experiments",
        "praxis_lite.experiments.published",
    ],
    package_dir={"praxis_lite.tasks": "tasks", "praxis_lite.experiments": "experiments"},
    long_description=readme(),
    long_description_content_type="text/markdown",
)
