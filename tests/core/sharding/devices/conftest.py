"""XLA's two partitioners."""

import jax
import pytest

from tests.support.marks import slow_but


@pytest.fixture(params=slow_but({"shardy"}, ["shardy", "gspmd"]))
def partitioner(request):
    """Sets which of XLA's partitioners compiles, for a test."""
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", request.param == "shardy")
    yield request.param
    jax.config.update("jax_use_shardy_partitioner", before)
