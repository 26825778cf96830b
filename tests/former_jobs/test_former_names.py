"""Every name that a config.json of commit d8700de could hold leads to what it means today."""

from pathlib import Path

import pytest

from praxis_lite import ConfigError
from praxis_lite.former_names import name_today
from praxis_lite.run.config.names import imported, is_allowed, name_of
from praxis_lite.run.config.node_form import check

FORMER = Path(__file__).parent


def names_in(file):
    """Returns [(module, name)] of lines "module: name name"; indented lines go on."""
    text = (FORMER / file).read_text().replace("\n    ", " ")
    lines = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    return [(module.removesuffix(":"), name) for module, *names in lines for name in names]


def test_each_name_leads_to_a_public_one_that_is_there():
    names = names_in("names.txt")
    for module, name in names:
        today = name_today(module, name)
        assert is_allowed(*today, ()), (module, name)
        written = name_of(imported(*today))
        assert written is not None and is_allowed(*written, ()), (module, name)
        assert written[1] == today[1]
    assert len(names) > 250


@pytest.mark.parametrize("module, name", names_in("names_gone.txt")[::5])
def test_a_name_that_is_gone_says_what_to_do(module, name):
    with pytest.raises(ConfigError, match=name):
        imported(*check({"name": f"{module}:{name}"}, ())[f"{module}:{name}"])


@pytest.mark.parametrize("former, today", {
    "praxis_lite.learner:Learner": "praxis_lite.core:Learner",
    "praxis_lite.learner.optimizers:adam": "praxis_lite.optimizers:adam",
    "praxis_lite.partitioner:ShardMapPartitioner": "praxis_lite.collectives:ShardMapPartitioner",
    "praxis_lite.models:Model": "praxis_lite.core:Model",
    "praxis_lite.experiments.huggingface:write_questions":
        "praxis_lite.experiments.huggingface:questions",
    "praxis_lite.layers:WeightInit.Xavier": "praxis_lite.layers:WeightInit.Xavier",
    "tasks.loss:Mine": "tasks.loss:Mine",
}.items())
def test_a_name_moves_with_its_package_or_alone(former, today):
    assert ":".join(name_today(*former.split(":"))) == today


def test_a_name_that_is_not_public_says_what_to_take():
    node = {"name": "praxis_lite.layers.attention.masks:causal_mask"}
    with pytest.raises(ConfigError, match="praxis_lite.layers"):
        check(node, ())
