"""The tools of training jobs come from one package."""

import importlib.metadata

import pytest

from praxis_lite import ConfigError
from praxis_lite.installed_tools import installed_job_tools


def test_tools_of_two_packages_are_refused(monkeypatch):
    points = [
        importlib.metadata.EntryPoint(name, f"{name}.tools:TOOLS", "praxis_lite.job_tools")
        for name in ("praxis_tools", "mypackage")
    ]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)
    with pytest.raises(ConfigError, match=r"mypackage\.tools:TOOLS, praxis_tools\.tools:TOOLS"):
        installed_job_tools()
