"""Tests that published results are reproduced, and that losses are equal on several meshes."""

import math

import fiddle as fdl
import numpy as np
import pytest

from benchmarks import published
from praxis_lite.core import Partitioner, make_mesh
from praxis_lite.experiment.registry import get_experiment
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
SLOW = {"names.Mlp"}
ROWS = {row.name: row for row in published.ROWS}


def require_data(experiment):
    if experiment.startswith("mnist1d.") and not is_installed("mnist1d"):
        pytest.skip("mnist1d is not installed")


@pytest.mark.parametrize("name", slow_or_nightly((), SLOW, SMALL))
def test_its_first_losses_are_equal_on_uneven_meshes(name):
    require_data(name)
    actual = published.differences(name, MESHES, NUM_STEPS, SMALL[name])
    assert max(actual.values()) <= published.LIMIT, actual


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in ROWS if name != "char"])  # Needs a GPU.
def test_it_reaches_the_published_figure(name, tmp_path):
    row = ROWS[name]
    require_data(row.experiment)
    figure, _ = published.measure_row(row, tmp_path, {})
    assert row.accepted[0] <= figure <= row.accepted[1]


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
