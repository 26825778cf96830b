"""Tests that published results are reproduced, and that losses are equal on several meshes."""

import math

import fiddle as fdl
import numpy as np
import pytest

from benchmarks import published
from praxis_lite.core import Partitioner, make_mesh
from praxis_lite.experiment.registry import get_experiment
from praxis_lite.experiments.published import DATA
from praxis_lite.experiments.published.addition import PAD, sums
from praxis_lite.experiments.published.mnist1d import mnist1d
from praxis_lite.experiments.published.names import contexts
from praxis_lite.host.optional_packages import is_installed
from tests.support.marks import slow_or_nightly

MESHES = [(1, 3, 1), (1, 4, 2)]
NUM_STEPS = 5
# Settings, keyed by experiment, for fast steps with uneven batches and dims.
GPT = {"batch_size": 7, "block_size": 13, "n_layer": 2, "n_head": 3, "n_embd": 39}
SMALL = {
    "addition.Addition": {"batch_size": 7, "hidden_size": 13},
    "char.Char": GPT,
    "char.CharCpu": GPT,
    "char.CharStart": GPT,
    "grokking.Grokking": {"batch_size": 37},
    "mnist1d.Cnn": {"batch_size": 13},
    "mnist1d.Gru": {"batch_size": 13},
    "mnist1d.Logistic": {"batch_size": 13},
    "mnist1d.Mlp": {"batch_size": 13},
    "mqar.Attention": {"batch_size": 7, "num_examples": 100},
    "mqar.Convolution": {"batch_size": 7, "num_examples": 100},
    "names.Mlp": {"batch_size": 13},
    "names.Transformer": {"batch_size": 13, "n_layer": 2},
    "names.WaveNet": {"batch_size": 13},
    "speed.Gpt2": GPT | {"vocab_size": 61, "task.model.fprop_dtype": np.float32},
    "transfer.Narrow": {"batch_size": 7, "block_size": 13},
}
QUICK, SLOW = {"mnist1d.Logistic"}, {"names.Mlp"}
SPLITS = ("train", "heldout")
NUM_SEEDS = {"addition": 3}  # Its losses have spikes, so seeds differ by a factor of three.
ROWS = {row.name: row for row in published.ROWS}


def require_data(experiment):
    if experiment.startswith("mnist1d.") and not is_installed("mnist1d"):
        pytest.skip("mnist1d is not installed")


@pytest.mark.parametrize("name", slow_or_nightly(QUICK, SLOW, SMALL))
def test_its_first_losses_are_equal_on_uneven_meshes(name):
    require_data(name)
    actual = published.differences(name, MESHES, NUM_STEPS, SMALL[name])
    assert max(actual.values()) <= published.LIMIT, actual


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in ROWS if name != "char"])  # Needs a GPU.
def test_it_reaches_the_published_figure(name, tmp_path):
    row = ROWS[name]
    require_data(row.experiment)
    figures = [
        published.measure_row(
            row, tmp_path / str(seed), {"run.seed": seed, "datasets.train.seed": seed}
        )[0]
        for seed in range(NUM_SEEDS.get(name, 1))
    ]
    assert row.accepted[0] <= np.mean(figures) <= row.accepted[1]


def short_run(name, num_steps, job_dir, **settings):
    """Trains a row for a few steps, and returns its final figure on held-out data."""
    last_only = {"run.num_train_steps": num_steps, "run.evaluation.every_steps": num_steps}
    return published.measure_row(ROWS[name], job_dir, last_only | settings)[0]


def log_probs(counts):
    return np.log((counts + 1) / np.sum(counts + 1, axis=-1, keepdims=True))


def test_a_short_run_on_names_is_better_than_a_bigram_model(tmp_path):
    train, heldout = contexts("train", 3), contexts("heldout", 3)
    counts = np.zeros((27, 27))
    np.add.at(counts, (train["inputs"][:, -1], train["labels"]), 1)
    bigram = -np.mean(log_probs(counts)[heldout["inputs"][:, -1], heldout["labels"]])
    assert short_run("names.mlp", 1500, tmp_path) < bigram - 0.04


def test_a_short_run_on_text_is_better_than_character_frequencies(tmp_path):
    texts = {split: (DATA / f"tinyshakespeare_{split}.txt").read_bytes() for split in SPLITS}
    train, heldout = (np.frombuffer(texts[split], np.uint8) for split in SPLITS)
    unigram = -np.mean(log_probs(np.bincount(train, minlength=128))[heldout])
    small = {"n_layer": 1, "n_embd": 32, "n_head": 2, "block_size": 32, "learning_rate": 3e-3}
    assert short_run("char-cpu", 150, tmp_path, **small) < unigram - 0.4


def test_a_short_run_on_sums_is_better_than_digit_frequencies(tmp_path):
    small = {"hidden_size": 32, "batch_size": 32}
    train, heldout = (sums(split, 3200)["answer"][:, 1:] for split in SPLITS)
    losses = np.zeros(heldout.shape)
    for i, digits in enumerate(heldout.T):
        losses[:, i] = -log_probs(np.bincount(train[:, i], minlength=15))[digits]
    frequencies = np.mean(losses * (heldout != PAD))
    assert short_run("addition", 250, tmp_path, num_train_steps=250, **small) < frequencies - 0.03


def test_a_short_run_on_signals_is_better_than_the_nearest_mean(tmp_path):
    require_data("mnist1d.Logistic")
    train, heldout = (mnist1d(split) for split in SPLITS)
    means = np.stack([np.mean(train["inputs"][train["labels"] == i], axis=0) for i in range(10)])
    distances = np.sum((heldout["inputs"][:, None] - means) ** 2, axis=-1)
    nearest = np.mean(np.argmin(distances, axis=-1) == heldout["labels"])
    assert short_run("mnist1d.logistic", 500, tmp_path) > nearest + 0.02


# Parameter counts that the sources print. nanoGPT prints 10.65M, without position embeddings.
NUM_PARAMETERS = {
    "char.Char": 10_646_784 + 256 * 384,
    "names.Mlp": 12_097,
    "names.WaveNet": 76_579,
    "speed.Gpt2": 124_475_904,
}


@pytest.mark.parametrize("name", NUM_PARAMETERS)
def test_it_has_as_many_parameters_as_the_source(name):
    job = fdl.build(get_experiment(f"published.{name}")().config())
    layout = Partitioner(job.task, make_mesh(job.mesh)).layout
    weights = [leaf for leaf in layout.leaves() if leaf.path.startswith("mdl_vars/params/")]
    assert sum(math.prod(leaf.shape) for leaf in weights) == NUM_PARAMETERS[name]


@pytest.mark.slow
def test_a_measurement_starts_with_the_initial_weights(tmp_path):
    settings = {**GPT, "n_layer": 1, "run.num_train_steps": 20, "eval_interval": 10}
    figure, run = published.measure_row(ROWS["char-cpu"], tmp_path, settings)
    assert run.x.tolist() == [0, 10, 20]
    assert run.values[0] == pytest.approx(math.log(65), abs=0.05)  # Uniform over characters.
    assert figure == run.values[-1] < run.values[0]


def test_names_are_split_as_in_the_lectures():
    # Sizes that the notebook prints.
    sizes = {split: contexts(split, 3)["inputs"].shape for split in ("train", "heldout")}
    assert sizes == {"train": (182625, 3), "heldout": (22655, 3)}
