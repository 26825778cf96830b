"""Golden files of other systems, kept beside the checkout and not in it."""

import json
from pathlib import Path
from typing import Any

import pytest

GOLDENS = Path(__file__).parents[3] / "shared" / "goldens"


def golden(path: str) -> Any:
    """Returns the content of a JSON file of `../shared/goldens`; skips the test without it."""
    if not (GOLDENS / path).exists():
        pytest.skip(f"no golden file {GOLDENS / path}")
    return json.loads((GOLDENS / path).read_text())


def trimmed(spec: Any) -> list:
    """Returns a PartitionSpec, or its JSON, as a list without trailing None; P(()) is P(None)."""
    entries = [list(e) if isinstance(e, (list, tuple)) else e for e in spec]
    while entries and entries[-1] is None:
        entries.pop()
    return entries
