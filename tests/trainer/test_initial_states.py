"""A job whose weights come from elsewhere: a source by a protocol of two methods."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from praxis_lite.job.job_dir import JobDir
from praxis_lite.modes.mode import CommandLine
from praxis_lite.modes.train import Train
from praxis_lite.trainer.job_tools import JobTools
from tests.support.job_runs import home, loaded

PATH = "mdl_vars/params/softmax/logits_ffn/linear/w"


class Sevens:
    """An InitialState: one weight is 7 everywhere."""

    step = 0
    paths = (PATH,)

    def __init__(self, value, layout):
        assert value == "seven"
        (self.leaf,) = [leaf for leaf in layout.leaves() if leaf.path == PATH]

    def keep(self, files):
        (files.path / "kept.txt").write_text("seven")

    def read(self, mesh, note):
        note("reading sevens")
        x = np.zeros(self.leaf.padded_shape, self.leaf.dtype)
        x[tuple(map(slice, self.leaf.shape))] = 7
        return {PATH: jax.device_put(x, NamedSharding(mesh, self.leaf.spec))}


@pytest.mark.slow
def test_a_source_that_the_run_does_not_know_gives_the_weights(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")
    home()
    command = CommandLine(
        exp="jobzoo.experiments.Tiny",
        packages=["jobzoo"],
        job_log_dir=str(tmp_path),
        settings=[
            "run.num_train_steps=1",
            "task.learner.learning_rate=0.0",
            "run.evaluation.max_batches=1",
            "run.init_from_huggingface=seven",
        ],
    )
    sources = {"init_from_huggingface": Sevens}
    Train(JobTools(sources=sources)).run(command)
    assert (tmp_path / "kept.txt").read_text() == "seven"
    assert "reading sevens" in (tmp_path / "log.txt").read_text()
    params = loaded(JobDir(tmp_path)).mdl_vars["params"]
    assert np.all(np.array(params["softmax"]["logits_ffn"]["linear"]["w"])[:7, :257] == 7)
    # All others are drawn.
    assert max(len(np.unique(x)) for x in jax.tree.leaves(params["transformer"])) > 50
