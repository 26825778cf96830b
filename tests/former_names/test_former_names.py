"""What users could import at two commits before the move, they can today, and are warned.

`COMMIT.txt` has a line per module of then: the names in its `__all__`, the classes of tasks and
experiments, and the names that the documentation, experiments and tasks of then imported from it.
"""

import importlib
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import praxis_lite  # noqa: F401 - it makes the former names importable.
from praxis_lite import former_names

FOLDER = Path(__file__).parent
COMMANDS = ("praxis_lite.checkpoints", "praxis_lite.interop.huggingface",
            "praxis_lite.interop.pax_job")


def names_of_then():
    """Returns {module: names} of both commits."""
    names = {}
    for file in sorted(FOLDER.glob("*.txt")):
        for line in file.read_text().splitlines():
            module, _, rest = line.partition(": ")
            names.setdefault(module, set()).update(rest.split())
    return names


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("module", names_of_then())
def test_a_name_of_then_is_there(module):
    for name in names_of_then()[module]:
        exec(f"from {module} import {name}", {})


def test_all_names_of_then_are_looked_at():
    assert sum(map(len, names_of_then().values())) > 350


def test_the_warning_is_at_the_users_own_line(tmp_path):
    user = tmp_path / "user.py"
    user.write_text(
        "import praxis_lite\n"
        "from praxis_lite.learner import Learner\n"
        "import praxis_lite.sharding as sharding\n"
        "from praxis_lite.models import NnxModel\n"
        "from praxis_lite.trainer.metrics import read_json_lines\n"
        "sharding.make_mesh\n"
    )
    # A process of its own, for a name is warned of once.
    result = subprocess.run(
        [sys.executable, "-W", "always::DeprecationWarning", user], capture_output=True, text=True,
        check=True,
    )
    warned = [line for line in result.stderr.splitlines() if "DeprecationWarning" in line]
    assert [line.split("user.py:")[1].split(":")[0] for line in warned] == ["2", "4", "5", "6"]
    assert "praxis_lite.learner.Learner is praxis_lite.core.Learner now" in warned[0]


@pytest.mark.parametrize("module", COMMANDS)
def test_a_command_of_then_runs_and_warns(module):
    result = subprocess.run(
        [sys.executable, "-W", "always::DeprecationWarning", "-m", module, "--help"],
        capture_output=True, text=True, check=True,
    )
    assert "usage: " in result.stdout
    assert f"{module} is {former_names.module_today(module)} now" in result.stderr


def test_a_former_name_is_the_object_of_today():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        former = importlib.import_module("praxis_lite.partitioner").Partitioner
    assert former is importlib.import_module("praxis_lite.core").Partitioner


def test_a_name_that_never_was_is_no_former_name():
    with pytest.raises(ImportError, match="praxis_lite.learnt"):
        importlib.import_module("praxis_lite.learnt")
    with pytest.raises(ImportError, match="Lerner"):
        exec("from praxis_lite.learner import Lerner", {})


@pytest.mark.parametrize("module, name", former_names.NAMES)
def test_each_single_former_name_leads_somewhere_and_warns(module, name):
    former = importlib.import_module(module)
    vars(former).pop(name, None)  # Else it was asked for before, and is warned of once.
    with pytest.warns(DeprecationWarning, match=f"{module}.{name}"):
        getattr(former, name)
