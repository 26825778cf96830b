"""Data in place of configs of pipelines: the error names a pipeline for them."""

import re

import fiddle as fdl
import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite import ConfigError, MLflow, WeightsAndBiases
from praxis_lite.config import build
from praxis_lite.experiments.lm import Synthetic
from praxis_lite.host import optional_packages
from praxis_lite.inputs import FromSource, TfRecords

X = np.zeros((8, 2), np.float32)


@pytest.mark.parametrize(
    "data",
    [
        X,
        jnp.asarray(X),
        (X, X),
        {"x": X},
        [[1, 2], [3, 4]],
        (x for x in X),
        3,
        "data.csv",
        object(),
    ],
)
@pytest.mark.parametrize("is_named", [True, False])
def test_data_in_place_of_pipelines_are_refused_with_a_pipeline(data, is_named):
    class WithData(Synthetic):
        def datasets(self):
            return {"train": data} if is_named else data

    with pytest.raises(ConfigError, match=r"fdl\.Config\(InMemory.*docs/data\.md"):
        WithData().config()


def test_all_missing_packages_of_a_config_are_in_one_error(monkeypatch):
    config = Synthetic().config()
    config.run.trackers = {"a": fdl.Config(MLflow), "b": fdl.Config(WeightsAndBiases)}
    config.datasets["train"] = fdl.Config(
        FromSource, fdl.Config(TfRecords, "x.tfrecord"), 3, shuffle=True
    )
    config.task.quantization = "int8"
    missing = {"mlflow", "wandb", "google_crc32c", "qwix"}
    for module in (build, optional_packages):
        monkeypatch.setattr(module, "is_installed", lambda name: name not in missing)
    for first in sorted(missing):
        with pytest.raises(ConfigError) as error, build.naming_settings(config):
            optional_packages.require_package(first, "A feature")
        message = str(error.value)
        assert all(name in message for name in missing)
        extras = re.search(r"To install all: pip install 'praxis_lite\[(.*)\]'", message)[1]
        assert set(extras.split(",")) == {"mlflow", "wandb", "sources", "quantization"}
