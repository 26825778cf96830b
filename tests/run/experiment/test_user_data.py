"""Data in place of configs of pipelines: the error names a pipeline for them."""

import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite import ConfigError
from praxis_lite.experiments.lm import Synthetic

X = np.zeros((8, 2), np.float32)


@pytest.mark.parametrize("data", [
    X, jnp.asarray(X), (X, X), {"x": X}, [[1, 2], [3, 4]], (x for x in X), 3, "data.csv", object(),
])
@pytest.mark.parametrize("is_named", [True, False])
def test_data_in_place_of_pipelines_are_refused_with_a_pipeline(data, is_named):
    class WithData(Synthetic):
        def datasets(self):
            return {"train": data} if is_named else data

    with pytest.raises(ConfigError, match=r"fdl\.Config\(InMemory.*docs/data\.md"):
        WithData().config()
