"""A user's own package elsewhere, with the library installed from a wheel."""

import ast
import os
import re
import shutil
import subprocess
import sys

import pytest

from praxis_lite.metrics import read_json_lines
from tests.job_runs import CHECKOUT


def readme_block(name):
    text = (CHECKOUT / "README.md").read_text(encoding="utf-8")
    block = re.search(rf"begin {name} -->\n```python\n(.*?)```\n<!-- end {name}", text, re.DOTALL)
    assert block, f"README.md has no block {name}"
    return block.group(1)


def test_the_readmes_experiment_has_at_most_25_lines():
    (experiment,) = [
        node for node in ast.parse(readme_block("MyLm")).body if isinstance(node, ast.ClassDef)
    ]
    first = experiment.decorator_list[0].lineno
    assert experiment.end_lineno - first + 1 <= 25


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder in which the wheel of this checkout is installed, and nothing else."""
    pytest.importorskip("setuptools", reason="builds the wheel; tensorboard brings it")
    folder = tmp_path_factory.mktemp("wheel")
    # A copy, for a build leaves its traces in the tree.
    source = folder / "source"
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(CHECKOUT / name, source)
    for name in ("praxis_lite", "tasks", "experiments"):
        shutil.copytree(
            CHECKOUT / name, source / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    for command in (
        # What the package needs is in the environment already: nothing is fetched.
        ["wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", folder, source],
        ["install", "--no-deps", "--no-index", "--no-compile", "--target", folder / "site"],
    ):
        wheels = list(folder.glob("praxis_lite-*.whl")) if command[0] == "install" else []
        done = subprocess.run([*pip, *command, *wheels], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return folder / "site"


def test_the_wheel_holds_the_library_its_tasks_and_experiments_only(site):
    tops = {name for name in os.listdir(site) if not name.endswith(".dist-info")}
    assert tops == {"praxis_lite", "tasks", "experiments"}
    for package in ("sharding", "layers", "inputs", "metrics", "models", "decode"):
        assert (site / "praxis_lite" / package / "__init__.py").is_file()


def test_a_users_package_runs_from_an_empty_folder_with_the_installed_library(site, tmp_path):
    (tmp_path / "mypackage").mkdir()
    (tmp_path / "mypackage/__init__.py").touch()
    (tmp_path / "mypackage/experiments.py").write_text(
        readme_block("MyLm")
        # Whose library it was.
        + "\nimport praxis_lite, tasks\nprint(praxis_lite.__file__, tasks.__file__)\n"
    )
    argv = ["--packages=mypackage", "--exp=mypackage.experiments.MyLm"]
    argv += ["--job_log_dir=jobs/my_lm", "--set"]
    # Few steps and a short evaluation of the same model, on short rows.
    argv += ["run.num_train_steps=3", "run.max_eval_batches=1"]
    argv += [f"datasets.{name}.seq_len=16" for name in ("train", "heldout")]
    env = {**os.environ, "PYTHONPATH": str(site), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-m", "praxis_lite.main", *argv],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{site}/praxis_lite/__init__.py {site}/tasks/__init__.py" in done.stdout
    assert str(CHECKOUT) + os.sep not in done.stdout
    steps = read_json_lines(tmp_path / "jobs/my_lm/metrics.jsonl")
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert "trained to step 3" in done.stdout and "heldout: " in done.stdout
    # The library's own experiments are there as well.
    listed = subprocess.run(
        [sys.executable, "-m", "praxis_lite.main", "--list", "--packages=mypackage"],
        cwd=tmp_path, env=env, capture_output=True, text=True,
    )
    assert "lm.PyDocs" in listed.stdout and "mypackage.experiments.MyLm" in listed.stdout
