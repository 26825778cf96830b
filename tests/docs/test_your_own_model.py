"""docs/your_own_model.md: its blocks, saved under their names, are run as they stand."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from praxis_lite import ConfigError
from tests.support.job_runs import succeed

PAGE = (Path(__file__).parents[2] / "docs/your_own_model.md").read_text(encoding="utf-8")
BLOCKS = {
    block.splitlines()[0].removeprefix("# "): block
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
}
(TRAIN,) = re.findall(r"^    python -m praxis_lite.main (.*)$", PAGE, re.MULTILINE)


def run(name):
    names = {"__name__": name.removesuffix(".py")}
    exec(compile(BLOCKS[name], name, "exec"), names)
    return names


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the page's files, the current directory and on sys.path."""
    folder = tmp_path_factory.mktemp("page")
    for name, block in BLOCKS.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(block, encoding="utf-8")
    (folder / "mymodel/__init__.py").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "mymodel"]:
        del sys.modules[name]


@pytest.mark.slow
def test_the_pages_own_tests_pass(folder):
    names = run("test_mymodel.py")
    tests = [name for name in names if name.startswith("test_")]
    assert len(tests) == 2
    for name in tests:
        names[name]()


@pytest.mark.slow
def test_it_trains_and_the_trained_model_answers_in_python(folder, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    done = succeed(*TRAIN.split())
    names = run("look.py")
    assert "params/layers/0/gate (13, 37)" in capsys.readouterr().out
    points, predicted = names["points"], names["predicted"]
    np.testing.assert_allclose(
        predicted, np.sin(3 * points[:, 0]) * points[:, 1], atol=0.1, err_msg=done.out
    )
    assert names["model"].evaluate("heldout")["loss"] < 0.01
    with pytest.raises(ConfigError, match="SquaredErrorTask"):
        names["model"].generate("a prompt")
