"""Fixtures: the process that forks jobs, and jobs to damage, shared by the tests in this folder."""

import pytest

from tests.faults.damage import Damage
from tests.faults.zygote import Zygote


@pytest.fixture(scope="session")
def zygote():
    """Yields the process that launches jobs."""
    with Zygote() as process:
        yield process


@pytest.fixture(scope="session")
def damage(zygote):
    """Returns a complete job with 12 steps, and a job to damage that was killed after step 10."""
    return Damage(zygote)
