"""docs/notebooks: their code cells run as they stand, one after the other, in a new process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.job_runs import CHECKOUT, home
from tests.test_public_names import private

NOTEBOOKS = sorted((CHECKOUT / "docs/notebooks").glob("*.ipynb"))
# Cells are run in `__main__`, which has no file, as in a notebook's kernel.
RUN = """
import json, sys
names = vars(sys.modules["__main__"])
for number, cell in enumerate(json.load(open(sys.argv[1], encoding="utf-8"))["cells"]):
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
        print(f"cell {number} has run", flush=True)
"""


def cells_of(path: Path) -> list[dict]:
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document["nbformat"] == 4
    return document["cells"]


def run(name: str, folder: Path) -> tuple[list[str], str]:
    """Returns the lines that a notebook's cells print, run in `folder`, and its errors."""
    path = CHECKOUT / f"docs/notebooks/{name}.ipynb"
    environment = {
        name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"
    }
    environment |= {"PYTHONPATH": str(CHECKOUT), "XDG_CACHE_HOME": str(home() / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(path)],
        cwd=folder,
        env=environment,
        text=True,
        capture_output=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    code = [number for number, cell in enumerate(cells_of(path)) if cell["cell_type"] == "code"]
    assert f"cell {code[-1]} has run" in done.stdout
    return done.stdout.splitlines(), done.stderr


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_small_without_outputs_and_import_public_names_alone(path):
    assert path.stat().st_size < 20_000
    for cell in cells_of(path):
        source = "".join(cell["source"])
        assert cell["id"] and source.strip()
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
            assert private(source) == []


@pytest.mark.slow
def test_an_own_model_learns_and_goes_on_on_another_mesh(tmp_path):
    lines, errors = run("own_model", tmp_path)
    assert errors == ""
    log = (tmp_path / "jobs/wave/log.txt").read_text()
    assert "mesh (data 8): 8 simulated CPU devices" in log
    (shown,) = [line for line in lines if line.startswith("TrainedModel(__main__.LearnWave")]
    assert "step 400" in shown and "mesh (data 4)" in shown
    assert float(shown.partition("heldout loss ")[2].partition(";")[0]) < 0.002
    whole, sharded = (
        int(line.split()[0])
        for words in ("bytes if replicated", "bytes with FSDP")
        for line in lines
        if line.endswith(words)
    )
    assert sharded < whole / 5


@pytest.mark.nightly
def test_a_model_of_hugging_face_learns_to_answer_and_is_exported(tmp_path):
    lines, _ = run("finetuning", tmp_path)
    assert "What comes after 2? -> 3 comes." in lines
    assert (tmp_path / "merged/model.safetensors").is_file()
