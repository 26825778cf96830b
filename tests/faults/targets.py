"""Resumes a job with a different model, learner, data or run, which must raise an error."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from tests.faults import damage
from tests.faults.outcome import Row, tail
from tests.faults.zoo import SAVE_EVERY, home, train_argv
from tests.faults.zygote import Zygote

_INIT, _PARAMS = "task.model.init", "mdl_vars/params"
# The changed settings, and strings that the error must contain: the leaf or setting, the value in
# the checkpoint, the expected value, and the step. There are no values if a leaf exists only on one
# side.
_STEP = f"step {3 * SAVE_EVERY}"
TARGETS: Sequence[tuple[str, ...]] = (
    (f"{_INIT}.hidden=11", f"{_PARAMS}/b", "[7]", "[11]", _STEP),
    (f"{_INIT}.hidden=3", f"{_PARAMS}/w", "[5, 7]", "[5, 3]", _STEP),
    # The size after padding for the mesh, which Orbax would accept silently.
    (f"{_INIT}.hidden=8", f"{_PARAMS}/out", "[7, 1]", "[8, 1]", _STEP),
    (f"{_INIT}.dims=6", f"{_PARAMS}/w", "[5, 7]", "[6, 7]", _STEP),
    (f"{_INIT}.dims=4", f"{_PARAMS}/w", "[5, 7]", "[4, 7]", _STEP),
    (f"{_INIT}.dtype=bfloat16", f"{_PARAMS}/b", "float32", "bfloat16", _STEP),
    (f"{_INIT}.dtype=float16", f"{_PARAMS}/w", "float32", "float16", _STEP),
    (f"{_INIT}.without=('b',)", f"{_PARAMS}/b", "only in the checkpoint", _STEP),
    (f"{_INIT}.without=('scale',)", f"{_PARAMS}/scale", "only in the checkpoint", _STEP),
    (f"{_INIT}.extra=('more',)", f"{_PARAMS}/more", "only in the model", _STEP),
    (f"{_INIT}.extra=('W',)", f"{_PARAMS}/W", "only in the model", _STEP),
    ("task.learner.optimizer.name=sgd", "opt_states/slots", "only in the checkpoint", _STEP),
    ("task.learner.optimizer.name=lion", "opt_states/slots", "only in the checkpoint", _STEP),
    (
        "task.learner.ema_decay=0.0 run.evaluation.use_ema_states=False",
        "opt_states/ema",
        "only in the checkpoint",
        _STEP,
    ),
    ("datasets.train.seed=1", "seed", "0", "1", _STEP),
    ("datasets.train.batch_size=13", "batch_size", "11", "13", _STEP),
    ("datasets.train.arrays.seed=2", "sha256", _STEP),
    ("run.seed=1", "seed", "0", "1", _STEP),
    # Two leaves with the same name, because "." and "/" both separate names. This is detected
    # without a checkpoint.
    (f"{_INIT}.extra=('w.b',)", "['w']", "['w.b']"),
    (f"{_INIT}.extra=('a/b','a.b')", "['a.b']", "['a']['b']"),
)


def run(zygote: Zygote, job: Path, targets: Sequence[tuple[str, ...]]) -> Row:
    """Returns a row for launches with each of the changed settings, which must raise an error.

    Args:
      zygote: Process that launches jobs.
      job: A job that was killed after step 10. It is only copied.
      targets: Elements of TARGETS.
    """
    row = Row("changed settings: error names leaf, both values and step; no file changes")
    for setting, *words in targets:
        copy = Path(shutil.copytree(job, home() / "wrong_target"))
        before = _content(copy)
        launch = zygote.launch(train_argv(copy, *damage.SETTINGS, *setting.split()))
        row.tried += 1
        message = " ".join(launch.err.split())
        missing = [word for word in words if word not in message]
        if launch.code != 2 or "Traceback" in launch.err:
            row.failures.append(f"{setting}: {tail(launch)}")
        elif missing:
            row.failures.append(f"{setting}: the error does not contain {missing}: {message}")
        elif _content(copy) != before:
            row.failures.append(f"{setting}: the job's files were changed")
        shutil.rmtree(copy)
    return row


def _content(folder: Path) -> dict[str, bytes]:
    """Returns the contents of all files except the log and hidden files, such as the lock file."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name[0] != ".")
    return {str(path): path.read_bytes() for path in files if path.name != "log.txt"}
