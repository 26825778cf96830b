"""Jobs that train within a second, on data with faults: `jobzoo.lines.Line`."""

import json

from tests.support.job_runs import home

EXPERIMENTS = '''
import os

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax

from praxis_lite import (
    EvaluationSettings, Experiment, LossSpikeSettings, MeshConfig, RunConfig, SaveSettings,
    StopSettings, register,
)
from praxis_lite.experiment.run_settings import EarlyStopping
from praxis_lite.inputs.base import IndexedPipeline, spec_of
from praxis_lite.core.learner.learner import Learner
from praxis_lite.models import FunctionModel
from praxis_lite.tasks.loss import LossTask


class Lines(IndexedPipeline):
    """Points on a line with noise; a poisoned batch's are far off it, or no numbers."""

    def __init__(self, batch_size, poisoned=(), without=(), nan_at=(), weight=None,
                 tokenizer=None):
        self.batch_size, self.poisoned, self.without = batch_size, poisoned, without
        self.nan_at, self.weight = nan_at, weight

    @property
    def num_batches(self):
        return None

    def element_spec(self):
        n = self.batch_size
        weights = {} if self.weight is None else {"weights": ((n,), np.float32)}
        return spec_of(inputs=((n, 5), np.float32), labels=((n,), np.float32), **weights)

    def fingerprint(self):
        return {"batch_size": self.batch_size}

    def rows(self, index, rows):
        if os.environ.get("LINES_RAISE_AT") == str(index):
            raise RuntimeError("the plug was pulled")
        for one in self.without:
            index += index >= one
        rng = np.random.default_rng(index)
        inputs = rng.normal(size=(self.batch_size, 5)).astype(np.float32)
        labels = inputs @ np.arange(5, dtype=np.float32)
        labels += rng.normal(size=self.batch_size).astype(np.float32)
        if index in self.poisoned:
            labels *= 50
        if index in self.nan_at:
            labels[3] = np.nan
        batch = {"inputs": inputs, "labels": labels}
        if self.weight is not None:
            batch["weights"] = np.full(self.batch_size, self.weight, np.float32)
        return {name: leaf[rows] for name, leaf in batch.items()}


TOKENIZER = os.path.join(os.path.dirname(os.path.dirname(__file__)), "line_tokenizer")


def init(key):
    return {"w": jnp.zeros(5) + jax.random.normal(key, (5,))}


def loss(params, inputs, key):
    return jnp.square(inputs["inputs"] @ params["w"] - inputs["labels"])


@register
class Line(Experiment):
    """Fits a line to noisy points; batch 15 is poisoned."""

    def mesh(self):
        return fdl.Config(MeshConfig, ici_mesh_shape=(1, 2, 1))

    def task(self):
        learner = fdl.Config(Learner, optimizer=fdl.Partial(optax.adam), learning_rate=0.1)
        return fdl.Config(LossTask, fdl.Config(FunctionModel, init), loss, learner)

    def datasets(self):
        return {"train": fdl.Config(Lines, batch_size=13, poisoned=(15,))}

    def run(self):
        return fdl.Config(
            RunConfig, num_train_steps=29, checkpoints=fdl.Config(SaveSettings, every_steps=7),
            loss_spikes=fdl.Config(LossSpikeSettings, factor=20.0, action="roll_back"),
        )


@register
class Scheduled(Line):
    """A line learned at a rate that a schedule gives."""

    def task(self):
        task = super().task()
        task.learner.learning_rate = fdl.Config(optax.constant_schedule, 0.1)
        return task


@register
class Weightless(Line):
    """A line that is evaluated on rows which weigh nothing."""

    def datasets(self):
        heldout = fdl.Config(Lines, batch_size=13, weight=0.0)
        return {**super().datasets(), "heldout": heldout}

    def run(self):
        return fdl.Config(
            RunConfig, num_train_steps=7,
            evaluation=fdl.Config(EvaluationSettings, every_steps=3, max_batches=2),
        )


@register
class Evidenced(Line):
    """A line that is evaluated and certified, whose data name a tokenizer."""

    def datasets(self):
        train = {**super().datasets()}["train"]
        train.tokenizer = TOKENIZER
        return {"train": train, "heldout": fdl.Config(Lines, batch_size=13)}

    def run(self):
        return fdl.Config(
            RunConfig, num_train_steps=8, certify_every_steps=4,
            evaluation=fdl.Config(EvaluationSettings, every_steps=3, max_batches=2),
        )


@register
class Watched(Weightless):
    """A line that stops early."""

    def run(self):
        run = super().run()
        early = fdl.Config(EarlyStopping, metric="heldout/loss")
        run.stopping = fdl.Config(StopSettings, early=early)
        return run
'''
# A tokenizer for the letters a and b.
TOKENIZER = home() / "line_tokenizer"
TOKENIZER.mkdir(exist_ok=True)
(TOKENIZER / "tokenizer.json").write_text(
    json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": None,
            "post_processor": None,
            "decoder": None,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "vocab": {"a": 0, "b": 1},
                "merges": [],
            },
        }
    )
)
LINE = "--exp=jobzoo.lines.Line"
(home() / "jobzoo/lines.py").write_text(EXPERIMENTS)
