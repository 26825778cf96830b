"""A job begun with a real Pax checkpoint: its weights in their shards, evaluated, trained on."""

import json
import re
import sys
import textwrap
import zipfile

import numpy as np
import pytest

from praxis_lite import ConfigError, main
from praxis_lite.pax import job as pax_job
from tests.pax.test_checkpoints import MADE_BY_PAX, made_by_pax
from tests.support.commands import praxis

# The sizes of the checkpoint, split over a mesh that divides few of them.
EXPERIMENTS = '''
    import functools

    import fiddle as fdl
    import numpy as np
    import optax

    from praxis_lite import Experiment, MeshConfig, RunConfig, register
    from praxis_lite.inputs import InMemory
    from praxis_lite.layers import SharedEmbeddingSoftmax, TransformerLm, set_sharding_params
    from praxis_lite.core.learner.learner import Learner
    from praxis_lite.tasks.language_model import LanguageModelTask

    with np.load({numbers!r}) as file:
        IDS = file["in/ids"]
    ROWS = {{"ids": IDS, "labels": np.roll(IDS, -1, 1)}}

    def rows():
        return ROWS

    @register
    class FromPax(Experiment):
        """The model of the checkpoint."""

        def mesh(self):
            return fdl.Config(MeshConfig, ici_mesh_shape=(1, 4, 2))

        def task(self):
            lm = fdl.Partial(
                TransformerLm, vocab_size=13, model_dims=6, hidden_dims=5, num_heads=3,
                num_layers=2, max_seq_length=7,
                softmax_tpl=fdl.Partial(SharedEmbeddingSoftmax, scale_sqrt_depth=True),
            )
            batch = ("replica", "data")
            learner = fdl.Config(Learner, optimizer=fdl.Partial(optax.adamw), learning_rate=1e-3)
            return fdl.Config(
                LanguageModelTask, model=set_sharding_params(lm), learner=learner,
                inputs_split_mapping={{"map_1d": (batch,), "map_2d": (batch, None)}},
            )

        def datasets(self):
            return {{
                "train": fdl.Config(InMemory, rows, 3, shuffle=True),
                "heldout": fdl.Config(InMemory, rows, 3, shuffle=False),
            }}

        def run(self):
            return fdl.Config(RunConfig, num_train_steps=2)
'''


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    root = tmp_path_factory.mktemp("pax_job")
    with zipfile.ZipFile(MADE_BY_PAX / "scanned_gda.zip") as file:
        file.extractall(root / "pax")
    source = EXPERIMENTS.format(numbers=str(MADE_BY_PAX / "scanned_gda.npz"))
    (root / "paxzoo.py").write_text(textwrap.dedent(source))
    sys.path.insert(0, str(root))
    try:
        yield pax_job.begin_job("paxzoo.FromPax", root / "pax", root / "job", packages=["paxzoo"])
    finally:
        sys.path.remove(str(root))
        sys.modules.pop("paxzoo", None)


@pytest.mark.slow
def test_evaluation_gives_paxs_loss_and_training_goes_on_from_step_0(job, capsys):
    numbers = made_by_pax("scanned_gda")
    logits = numbers["out/logits"].astype(np.float64)
    labels = np.roll(numbers["in/ids"], -1, 1)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -np.take_along_axis(log_probs, labels[..., None], -1).mean()

    main.main(["--mode=eval", f"--job_log_dir={job.path}"])
    line = json.loads(job.eval_metrics_jsonl.read_text().splitlines()[-1])
    assert line["step"] == 0 and line["loss"] == pytest.approx(expected, rel=1e-5)

    main.main(["--exp=paxzoo.FromPax", "--packages=paxzoo", f"--job_log_dir={job.path}"])
    assert "restored the checkpoint of step 0" in capsys.readouterr().out
    first = json.loads(job.metrics_jsonl.read_text().splitlines()[0])
    assert first["step"] == 1 and first["loss"] == pytest.approx(expected, rel=1e-5)


def test_a_job_that_has_weights_already_is_refused(job):
    with pytest.raises(ConfigError, match="/job already has a job"):
        pax_job.begin_job("paxzoo.FromPax", job.path.parent / "pax", job.path)


def test_what_does_not_fit_is_said_before_anything_is_written(job, capsys, tmp_path):
    pax = job.path.parent / "pax"
    words = f"paxzoo.FromPax --packages=paxzoo --pax={pax} --job_log_dir={tmp_path}/job"
    assert praxis("pax", *words.split(), "--set", "task.model.num_layers=3") == 2
    message = " ".join(capsys.readouterr().err.split())
    assert re.search(r"linear/w \(layers 2\) is missing", message)
    assert [path.name for path in (tmp_path / "job").iterdir()] == [".training"]
