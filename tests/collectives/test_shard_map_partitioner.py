"""The former name of a Partitioner with explicit collectives, for a minor version."""

import importlib

import pytest

from praxis_lite.collectives import ShardMapPartitioner
from praxis_lite.core import Partitioner
from tests.support.explicit_partitioner import explicit_partitioner
from tests.support.lm_runs import batches as lm_batches
from tests.support.lm_runs import partitioner_of, structs


def test_it_compiles_the_step_of_the_strategy_and_warns(mesh_of):
    task, mesh = partitioner_of("uneven", "adamw", (1, 4, 2)).task, mesh_of(1, 4, 2)
    with pytest.warns(DeprecationWarning, match=r"gradients=ExplicitCollectives\(data_axes\)"):
        former = ShardMapPartitioner(task, mesh, data_axes=("data",))
    spec = structs(lm_batches("uneven")[0])
    texts = [
        item.train_step.lower(spec).as_text()
        for item in (former, explicit_partitioner(task, mesh), Partitioner(task, mesh))
    ]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("package", ["praxis_lite.core", "praxis_lite.partitioner"])
def test_its_former_packages_show_it_and_warn(package):
    with pytest.warns(DeprecationWarning, match="praxis_lite.collectives.ShardMapPartitioner"):
        vars(importlib.import_module(package)).pop("ShardMapPartitioner", None)
        actual = importlib.import_module(package).ShardMapPartitioner
    assert actual is ShardMapPartitioner
