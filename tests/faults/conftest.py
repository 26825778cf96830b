"""One process to fork jobs from, and the jobs that are damaged, for all tests of this folder."""

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
    """Returns jobs to damage: a whole one of 12 steps, and one that was killed after step 10."""
    return Damage(zygote)
