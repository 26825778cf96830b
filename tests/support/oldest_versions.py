"""Prints pip constraints that pin each dependency to its lower bound in pyproject.toml.

`make test-oldest` installs these versions and runs the quick tests. The tools of the extras
`docs` and `test`, and lm_eval, which .ci/run installs separately, are not pinned.
"""

import re
import tomllib
from pathlib import Path


def oldest_versions() -> list[str]:
    """Returns lines such as "numpy==2.2"."""
    path = Path(__file__).parents[2] / "pyproject.toml"
    project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    of_features = [extras[name] for name in extras if name not in ("docs", "test", "lm_eval")]
    requirements = [*project["dependencies"], *(item for extra in of_features for item in extra)]
    bounds = [re.match(r"([\w.-]+)>=([\w.]+)", item) for item in requirements]
    return sorted({f"{bound[1]}=={bound[2]}" for bound in bounds if bound})


if __name__ == "__main__":
    print(*oldest_versions(), sep="\n")
