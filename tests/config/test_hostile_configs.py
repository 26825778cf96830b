"""A config.json that is damaged, or that praxis_lite did not write, is refused in a sentence."""

import functools
import json
import sys

import pytest

from praxis_lite import ConfigError
from praxis_lite.config.config_json import dump_config, load_config
from praxis_lite.experiment import registry

SPIRALS = "praxis_lite.experiments.classify.Spirals"


@functools.cache
def spirals():
    experiment = registry.get_experiment("classify.Spirals")
    return dump_config(experiment().config(), SPIRALS)


def config_text(task):
    config = json.loads(spirals())
    config["config"]["arguments"]["task"] = task
    return json.dumps(config)


ACTING = {
    "a call": {"Config": "os:system", "arguments": {"command": "touch canary"}},
    "a partial": {"Partial": "os:system", "arguments": {"command": "touch canary"}},
    "positional arguments": {"functools.partial": "os:system", "items": ["x"], "arguments": {}},
    "below a list": {"list": [{"name": "os:system"}]},
    "a named tuple": {"namedtuple": "os:system", "items": []},
}


@pytest.mark.parametrize("case", ACTING)
def test_a_name_that_acts_is_refused(case):
    with pytest.raises(ConfigError, match=r"config\.json contains os\.system,"):
        load_config(config_text(ACTING[case]))


def test_a_package_that_is_not_listed_is_not_imported(tmp_path, monkeypatch):
    (tmp_path / "zoo_hostile.py").write_text("x = dict")
    monkeypatch.syspath_prepend(tmp_path)
    text = config_text({"name": "zoo_hostile:x"})
    with pytest.raises(ConfigError, match="--packages=zoo_hostile"):
        load_config(text)
    assert "zoo_hostile" not in sys.modules


DAMAGED = {
    "a reference to nothing": {"again": 7},
    "an empty object": {},
    "an unknown kind": {"pickle": "gASV"},
    "pairs that are none": {"dict": [[7]]},
    "a name that is none": {"name": 7},
    "arguments that are none": {"Config": "optax:adam", "arguments": [7]},
    "an argument that is not there": {"Config": "optax:adam", "arguments": {"a b": 7}},
    "a set of lists": {"set": [{"list": []}]},
    "a dtype that is none": {"dtype": "zebra"},
    "bytes that are none": {"bytes": "zz"},
    "a constant that is called": {"Config": "jax.lax:Precision.HIGHEST", "arguments": {}},
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_node_is_named(case):
    with pytest.raises(ConfigError, match=r"config\.json.*task|task.*config\.json"):
        load_config(config_text(DAMAGED[case]))


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: "[" * 100_000,
        lambda text: text.replace('"format": 3', '"format": 1'),
        lambda text: text.replace(SPIRALS, "\\u001b[2J"),
        lambda text: text.replace('"overrides": []', '"overrides": {"a": 1}'),
        lambda text: json.dumps({**json.loads(text), "config": {"list": []}}),
    ],
)
def test_a_damaged_text_is_refused_in_printable_words(change):
    with pytest.raises(ConfigError, match=r"^config\.json[ -~]*$"):
        load_config(change(spirals()))
