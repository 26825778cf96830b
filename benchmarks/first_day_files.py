"""Creates the user files that first_day.py needs: texts, chats, a package and a model."""

import json
import re
import shutil
import socket
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BROKEN = """\
import fiddle as fdl
import jax.numpy as jnp

from mymodel.experiments import Wave
from mymodel.layers import WaveModel
from praxis_lite import register


class Logarithms(WaveModel):
    def __call__(self, x):
        return jnp.log(super().__call__(x) - 9)


@register
class Broken(Wave):
    def task(self):
        task = super().task()
        task.model = fdl.Partial(Logarithms)
        return task
"""


def write(folder: Path) -> None:
    """Writes all files to a folder."""
    _texts(folder / "texts")
    _own_model(folder)
    _chats_and_model(folder)
    _task(folder / "tasks")
    _pax_job(folder)


def free_port() -> int:
    """Returns an unused port."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def _texts(folder: Path) -> None:
    """Writes the pages of this library's docs as the user's text."""
    folder.mkdir()
    for page in sorted((ROOT / "docs").glob("*.md")):
        shutil.copyfile(page, folder / f"{page.stem}.txt")


def _own_model(folder: Path) -> None:
    """Writes the package in docs/your_own_model.md, with an additional model that produces NaNs."""
    page = (ROOT / "docs/your_own_model.md").read_text("utf-8")
    (folder / "mymodel").mkdir()
    (folder / "mymodel/__init__.py").touch()
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        name = block.splitlines()[0].removeprefix("# ")
        if name.startswith("mymodel/"):
            (folder / name).write_text(block, "utf-8")
    (folder / "mymodel/broken.py").write_text(BROKEN, "utf-8")


def _chats_and_model(folder: Path) -> None:
    """Runs the cells in docs/notebooks/finetuning.ipynb that create chats.jsonl and llama/."""
    notebook = json.loads((ROOT / "docs/notebooks/finetuning.ipynb").read_text("utf-8"))
    code = ["".join(x["source"]) for x in notebook["cells"] if x["cell_type"] == "code"]
    made = next(number for number, source in enumerate(code) if "model.safetensors" in source)
    source = "\n".join(code[: made + 1])
    subprocess.run([sys.executable, "-c", source], cwd=folder, check=True, capture_output=True)


def _task(folder: Path) -> None:
    """Writes a task for lm_eval."""
    from tests.support.lm_eval_tasks import MORE, write_task

    folder.mkdir()
    rows = [
        {
            "question": f"What comes after {number}?",
            "gold": 0,
            "choices": [f"{number + 1} comes.", f"{number + 2} comes."],
        }
        for number in range(7)
    ]
    write_task(folder, "what_comes_after", rows, MORE["tiny_choice"])


def _pax_job(folder: Path) -> None:
    """Writes a checkpoint in Pax's format, and an experiment with the same model."""
    from tests.pax.test_job import EXPERIMENTS

    goldens = ROOT / "tests/goldens/pax_checkpoints/scanned_gda"
    with zipfile.ZipFile(goldens.with_suffix(".zip")) as file:
        file.extractall(folder / "pax")
    source = EXPERIMENTS.format(numbers=str(goldens.with_suffix(".npz")))
    (folder / "paxmodel.py").write_text(textwrap.dedent(source), "utf-8")
