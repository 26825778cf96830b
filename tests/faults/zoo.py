"""The job that the fault suite damages: tiny, but with all features that a resume must restore.

It has uneven sizes on a mesh of four devices, dropout, a moving average of the weights, and
evaluations. It saves every third step and retains two checkpoints.
"""

import atexit
import functools
import os
import shutil
import sys
import tempfile
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]

SAVE_EVERY = 3  # Keep in sync with run() below.
EXPERIMENT = "faultzoo.experiments.Tiny"

EXPERIMENTS = '''
"""A user's package with a job that launches quickly."""

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax

from praxis_lite import (
    EvaluationSettings, Experiment, MeshConfig, RunConfig, SaveSettings, register
)
from praxis_lite.host.places import local_file
from praxis_lite.inputs import InMemory
from praxis_lite.core.learner.learner import Learner
from praxis_lite.models import FunctionModel
from praxis_lite.tasks.loss import LossTask

SPECS = {"w": ("data", "mdl"), "b": ("mdl",), "out": ("mdl", None), "scale": ()}


def init(key, dims, hidden, dtype, extra, without):
    """Returns weights, with the additional weights `extra` and except the weights `without`."""
    one, other = jax.random.split(key)
    params = {
        "w": jax.random.normal(one, (dims, hidden), dtype), "b": jnp.zeros(hidden, dtype),
        "out": jax.random.normal(other, (hidden, 1)), "scale": jnp.ones(()),
    }
    params |= {name: jnp.ones(3) for name in extra}
    return {name: x for name, x in params.items() if name not in without}


def specs(params):
    return {name: SPECS.get(name) for name in params}


def loss(params, inputs, key):
    """Returns the squared error of each row, dropping an eighth of the hidden dims in training."""
    dims, hidden = params["w"].shape
    x = jnp.tile(inputs["x"], (1, 4))[:, :dims].astype(params["w"].dtype)
    x = jnp.tanh(x @ params["w"] + params.get("b", jnp.zeros(hidden))[None])
    if key is not None:
        x = jnp.where(jax.random.bernoulli(key, 0.875, x.shape), x / 0.875, 0.0)
    y = (x @ params["out"])[:, 0] * params.get("scale", 1.0)
    return jnp.square(y - inputs["y"])


def optimizer(learning_rate, name):
    return getattr(optax, name)(learning_rate)


def rows(seed, file):
    if file:
        with np.load(local_file(file)) as arrays:
            return dict(arrays)
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(53, 5)).astype(np.float32)
    return {"x": x, "y": np.sin(x.sum(axis=1))}


@register
class Tiny(Experiment):
    """Learns a sine with one hidden layer."""

    def mesh(self):
        return fdl.Config(MeshConfig, ici_mesh_shape=(1, 2, 2))

    def task(self):
        learner = fdl.Config(
            Learner, optimizer=fdl.Partial(optimizer, name="adam"), learning_rate=0.03,
            ema_decay=0.9, clip_gradient_norm_to_value=1.0,
        )
        batch = (("replica", "data"),)
        drawn = fdl.Partial(init, dims=5, hidden=7, dtype="float32", extra=(), without=())
        return fdl.Config(
            LossTask, fdl.Config(FunctionModel, drawn, specs=specs), loss, learner,
            inputs_split_mapping={"map_1d": batch, "map_2d": (*batch, None)},
        )

    def datasets(self):
        return {
            "train": fdl.Config(
                InMemory, fdl.Partial(rows, 0, file=""), batch_size=11, shuffle=True
            ),
            "heldout": fdl.Config(
                InMemory, fdl.Partial(rows, 1, file=""), batch_size=11, shuffle=False
            ),
        }

    def run(self):
        return fdl.Config(
            RunConfig, num_train_steps=40,
            checkpoints=fdl.Config(SaveSettings, every_steps=3, max_to_keep=2),
            evaluation=fdl.Config(EvaluationSettings, every_steps=6, use_ema_states=True),
        )
'''


@functools.cache
def home() -> Path:
    """Returns this process's folder with the package `faultzoo`, which is removed at exit."""
    folder = Path(tempfile.mkdtemp(prefix="faultzoo_", dir=os.environ.get("FAULTS_DIR")))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "faultzoo").mkdir()
    (folder / "faultzoo/__init__.py").touch()
    (folder / "faultzoo/experiments.py").write_text(EXPERIMENTS)
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    return folder


def train_argv(job: Path | str, *settings: str) -> list[str]:
    """Returns the command line that trains or resumes the job."""
    argv = [f"--exp={EXPERIMENT}", "--packages=faultzoo", f"--job_log_dir={job}"]
    return [*argv, "--set", *settings] if settings else argv
