"""A deprecated public name works in Python, in --set and in config.json, and warns."""

import importlib
import json
import re

import fiddle as fdl
import pytest

import praxis_lite.layers
from praxis_lite.config.config_json import dump_config, load_config
from praxis_lite.config.names import named
from praxis_lite.core.errors import ConfigError
from praxis_lite.layers import LayerNorm, WeightInit
from praxis_lite.public_names import DEPRECATED, PACKAGES, homes_of

NEW = {
    "praxis_lite.layers.OldNorm": "praxis_lite.layers.LayerNorm",
    "praxis_lite.decode.OldInit": "praxis_lite.layers.WeightInit",
    # A config may contain neither.
    "praxis_lite.layers.old_load": "praxis_lite.load",
}


@pytest.fixture(autouse=True)
def deprecated(monkeypatch):
    for old, new in NEW.items():
        monkeypatch.setitem(DEPRECATED, old, new)


def read(name):
    text = dump_config(fdl.Config(LayerNorm, dim=5), "praxis_lite.experiments.lm.PyDocs")
    assert text.count("praxis_lite.layers:LayerNorm") == 1
    return load_config(text.replace("praxis_lite.layers:LayerNorm", name)).config


def test_python_warns_at_the_line_of_the_caller():
    with pytest.warns(FutureWarning, match="use praxis_lite.layers.LayerNorm") as caught:
        assert praxis_lite.layers.OldNorm is LayerNorm
    assert [warning.filename for warning in caught] == [__file__]


def test_set_warns_and_finds_the_replacement_in_another_package():
    with pytest.warns(FutureWarning, match="use praxis_lite.layers.WeightInit.Xavier"):
        value = named("praxis_lite.decode.OldInit.Xavier", packages=())
    assert value == WeightInit.Xavier
    with pytest.warns(FutureWarning, match="OldNorm"):
        assert named("OldNorm", packages=()) is LayerNorm


def test_a_recorded_config_loads_without_a_warning_and_is_written_with_the_new_name():
    config = read("praxis_lite.layers:OldNorm")
    assert config == fdl.Config(LayerNorm, dim=5)
    written = json.loads(dump_config(config, "praxis_lite.experiments.lm.PyDocs"))
    assert written["config"]["Config"] == "praxis_lite.layers:LayerNorm"


def test_a_config_may_use_a_deprecated_name_only_if_it_may_use_the_replacement():
    with pytest.raises(ConfigError, match="praxis_lite.load"):
        read("praxis_lite.layers:old_load")


def test_each_deprecated_name_works_and_its_replacement_is_public(monkeypatch):
    monkeypatch.undo()
    for old, new in DEPRECATED.items():
        package, _, name = old.rpartition(".")
        assert package in PACKAGES and name not in homes_of(package)
        new_package, _, new_name = new.rpartition(".")
        assert new_name in homes_of(new_package), new
        with pytest.warns(FutureWarning, match=re.escape(new)):
            getattr(importlib.import_module(package), name)
