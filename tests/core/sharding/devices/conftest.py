"""XLA's two partitioners."""

import jax
import pytest


@pytest.fixture(params=["shardy", "gspmd"])
def partitioner(request):
    """Sets which of XLA's partitioners compiles, for a test."""
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", request.param == "shardy")
    yield request.param
    jax.config.update("jax_use_shardy_partitioner", before)
