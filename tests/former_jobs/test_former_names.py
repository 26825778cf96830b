"""Every name that a config.json of format 2 could hold leads to what it means today."""

from pathlib import Path

import pytest

from praxis_lite import ConfigError
from praxis_lite.run.config.former_names import experiment_today, name_today
from praxis_lite.run.config.names import imported, is_allowed, name_of
from praxis_lite.run.config.node_form import check

FORMER = Path(__file__).parent


def names_in(file):
    """Returns [(module, name)] of lines "module: name name"; indented lines go on."""
    text = (FORMER / file).read_text().replace("\n    ", " ")
    lines = [one.split() for one in text.splitlines() if one and not one.startswith("#")]
    return [(module.removesuffix(":"), name) for module, *names in lines for name in names]


def test_each_name_leads_to_a_public_one_that_is_there():
    names = names_in("names.txt")
    for module, name in names:
        today = name_today(module, name, 2, ())
        assert is_allowed(*today, ()), (module, name)
        written = name_of(imported(*today))
        assert written is not None and is_allowed(*written, ()), (module, name)
        assert written[1] == name
    assert len(names) > 180


@pytest.mark.parametrize("module, name", names_in("names_gone.txt")[::11])
def test_a_name_that_is_gone_says_what_to_do(module, name):
    today = name_today(module, name, 2, ())
    with pytest.raises(ConfigError, match="Restore it, or start a new job|Put a function"):
        imported(*today)


def test_a_class_may_be_renamed():
    assert name_today("praxis_lite.weights", "WeightSpec", 2, ()) == (
        "praxis_lite.core", "WeightSpec"
    )
    for config_format, module in ((2, "experiments.lm"), (3, "praxis_lite.experiments.lm")):
        today = name_today(module, "rotary_lm", config_format, ())
        assert today == ("praxis_lite.layers", "rotary_lm")
    assert experiment_today("experiments.lm.PyDocs", 2, ()) == "praxis_lite.experiments.lm.PyDocs"


def test_packages_of_the_users_keep_their_names():
    assert name_today("tasks.loss", "Mine", 2, ["tasks"]) == ("tasks.loss", "Mine")
    assert name_today("layers", "Linear", 2, ()) == ("layers", "Linear")


def test_a_name_that_is_not_public_says_what_to_take():
    node = {"name": "praxis_lite.layers.attention.masks:causal_mask"}
    with pytest.raises(ConfigError, match="take what praxis_lite.layers, .* list in __all__. Put"):
        check(node, ())
