"""Writes and continues the job that is stored for each release.

    python -m tests.releases.releases

writes the folder `tests/releases/VERSION` of the current version: an experiment, its texts, its job
after two steps, and the results of continuing this job. `make release-job` runs this command.
Checkpoints and config.json of each 1.x load in every later 1.x (docs/stability.md), so the folder
of a published release never changes.
"""

import dataclasses
import functools
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

import praxis_lite as pl

FOLDER = Path(__file__).parent
EXPERIMENT, JOB_ZIP, EXPECTED = "tiny_job.py", "job.zip", "expected.json"
TEXTS = {
    f"{name}.txt": "".join(
        f"{a} {sign} {b} = {compute(a, b)}\n" for a in range(7) for b in range(7)
    )
    for name, sign, compute in (("sums", "+", int.__add__), ("products", "*", int.__mul__))
}
# The mark of a job that did not end, a picture, and the files of a tracker.
NOT_STORED = (".training", "loss_curve.png", "tensorboard")
NUM_STEPS = 4


@dataclasses.dataclass(frozen=True)
class Release:
    """The stored job of a release, unpacked in a directory that is also the current directory.

    Attributes:
      experiment: The class of the experiment, as the release's users wrote it.
      job_dir: The directory of the job, whose only checkpoint is step 2.
    """

    experiment: type[pl.Experiment]
    job_dir: Path

    @functools.cached_property
    def loaded(self) -> pl.TrainedModel:
        return pl.load(self.job_dir)

    def evaluate(self) -> dict[str, float]:
        """Returns the metrics of the checkpoint on one device."""
        return self.loaded.evaluate("heldout")

    def decode(self) -> list[list[int]]:
        """Returns greedy continuations by the checkpoint on one device, as token ids."""
        return [record["output_ids"] for record in self.loaded.decode("heldout")]

    def resume(self) -> tuple[list[float], dict[str, float]]:
        """Trains to step 4 on the job's mesh; returns all losses, and the norm of each weight."""
        settings = {"run.num_train_steps": NUM_STEPS}
        resumed = pl.train(self.experiment, self.job_dir, settings=settings)
        norms = {
            path: float(np.linalg.norm(weight.astype(np.float64)))
            for path, weight in resumed.weights.items()
        }
        return resumed.metrics["loss"].tolist(), norms


def unpacked(folder: Path, into: Path) -> Release:
    """Unpacks a release's job into the current directory `into`."""
    for name in TEXTS:
        shutil.copy(folder / name, into)
    with zipfile.ZipFile(folder / JOB_ZIP) as file:
        file.extractall(into / "job")
    return Release(experiment_in(folder / EXPERIMENT), into / "job")


def experiment_in(path: Path) -> Any:
    """Returns the experiment that a copy of tiny_job.py defines."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # The job's config.json contains the name of the module.
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module.TinyJob


def write(folder: Path) -> None:
    """Writes the folder of a release. Changes the current directory."""
    folder.mkdir()
    shutil.copy(FOLDER / EXPERIMENT, folder)
    for name, text in TEXTS.items():
        (folder / name).write_text(text, encoding="utf-8")
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        for name in TEXTS:
            shutil.copy(folder / name, directory)
        pl.train(experiment_in(folder / EXPERIMENT), "job")
        for name in NOT_STORED:
            path = Path("job", name)
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        packed = shutil.make_archive(str(folder / Path(JOB_ZIP).stem), "zip", "job")
        assert Path(packed) == folder / JOB_ZIP
        release = Release(experiment_in(folder / EXPERIMENT), Path("job"))
        expected = {"evaluate": release.evaluate(), "decode": release.decode()}
        expected["losses"], expected["norms"] = release.resume()
        os.chdir(FOLDER)
    (folder / EXPECTED).write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    folder = FOLDER / pl.__version__
    if folder.exists():
        sys.exit(
            f"{folder} exists already. If {pl.__version__} was published, raise the version in "
            "praxis_lite/__init__.py first. Otherwise, remove the folder, and try again."
        )
    pl.core.simulate_devices(4)
    write(folder)
    print(f"wrote {folder}; add it to git")


if __name__ == "__main__":
    main()
