"""Data as people have them, returned by datasets(): the error has the line to write."""

import re
from unittest import mock

import fiddle as fdl
import jax.numpy as jnp
import numpy as np
import pytest

import praxis_lite
from praxis_lite import ConfigError, inputs
from praxis_lite.core.errors import ConfigError as CoreError
from praxis_lite.experiments.lm import Synthetic
from praxis_lite.host import optional_packages
from praxis_lite.run.experiment import setting_of

X = np.zeros((8, 2), np.float32)


class TorchLike:
    """As torch.utils.data.Dataset: a length, and examples by index."""

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return {"x": X[index]}


def tf_dataset():
    tensorflow = pytest.importorskip("tensorflow")
    return tensorflow.data.Dataset.from_tensor_slices({"x": X})


DATA = {
    "numpy": (lambda: X, "InMemory"), "jax": (lambda: jnp.asarray(X), "InMemory"),
    "a tuple": (lambda: (X, X), "InMemory"), "lists": (lambda: [[1, 2], [3, 4]], "InMemory"),
    "a dict": (lambda: {"x": X, "y": X}, "InMemory"), "torch": (TorchLike, "FromGrain"),
    "tf.data": (tf_dataset, "FromDataset"), "a generator": (lambda: (x for x in X), "MyPipeline"),
}


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("is_named", [True, False])
def test_data_in_place_of_pipelines_are_told_the_line_to_write(kind, is_named):
    make, name = DATA[kind]

    class WithData(Synthetic):
        def datasets(self):
            return {"train": make()} if is_named else make()

    with pytest.raises(ConfigError) as error:
        WithData().config()
    line = re.search(r"return (\{.*?\)\})", str(error.value))[1]
    places = {
        name: getattr(inputs, name, dict), "fdl": fdl, "load": dict, "make_dataset": dict,
    }
    (config,) = eval(line, places).values()
    assert isinstance(config, fdl.Config) and config.batch_size == 32


def test_what_is_no_data_gets_no_such_line():
    for value in (3, "data.csv", None, object()):
        class WithData(Synthetic):
            def datasets(self, value=value):
                return {"train": value}

        with pytest.raises(ConfigError) as error:
            WithData().config()
        assert "InMemory" not in str(error.value) and "make_dataset" not in str(error.value)


def test_all_missing_packages_of_a_config_are_in_one_error():
    config = Synthetic().config()
    trackers = {"a": fdl.Config(praxis_lite.MLflow), "b": fdl.Config(praxis_lite.WeightsAndBiases)}
    config.run.trackers = trackers
    source = fdl.Config(inputs.TfRecords, "x.tfrecord")
    config.datasets["train"] = fdl.Config(inputs.FromSource, source, 3, shuffle=True)
    config.task.quantization = "int8"
    missing = {"mlflow", "wandb", "google_crc32c", "qwix"}
    for first in sorted(missing):
        with (
            mock.patch.object(optional_packages, "is_installed", lambda name: name not in missing),
            mock.patch.object(setting_of, "is_installed", lambda name: name not in missing),
            pytest.raises(CoreError) as error, setting_of.naming_settings(config),
        ):
            optional_packages.require_package(first, "A feature")
        message = str(error.value)
        assert all(name in message for name in missing)
        extras = re.search(r"For all: pip install 'praxis_lite\[(.*)\]'", message)[1]
        assert set(extras.split(",")) == {"mlflow", "wandb", "sources", "quantization"}
