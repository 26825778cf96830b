"""docs/python.md: its blocks run as they stand, one after the other, in a new process."""

import inspect
import os
import re
import subprocess
import sys

import pytest

import praxis_lite as pl
from tests.support.job_runs import CHECKOUT, home

PAGE = (CHECKOUT / "docs/python.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_pages_blocks_run(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    environment = {
        name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"
    }
    environment |= {"PYTHONPATH": str(CHECKOUT), "XDG_CACHE_HOME": str(home() / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)], cwd=tmp_path, env=environment, text=True,
        capture_output=True, timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "step 20, loss" in done.stdout and "trained to step 25" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("True ")


@pytest.mark.parametrize("name", ["train", "explain", "plan", "check", "report"])
def test_each_argument_is_on_the_page(name):
    parameters = inspect.signature(getattr(pl, name)).parameters
    assert [word for word in parameters if word not in PAGE] == []


def test_each_member_of_a_trained_model_is_on_the_page():
    members = [name for name in vars(pl.TrainedModel) if not name.startswith("_")]
    found = [name for name in members if f"`{name}" not in PAGE]
    assert {name.removesuffix("_with") for name in found} <= {"mdl_vars"}
