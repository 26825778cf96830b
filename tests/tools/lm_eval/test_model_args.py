"""What is wrong in `--model_args` is said before a model is loaded."""

import pytest

from praxis_lite import ConfigError, MeshConfig
from praxis_tools.lm_eval import model_args


@pytest.mark.parametrize("given, words", [
    ({}, "--model_args contains neither job=DIR nor pretrained=DIR"),
    ({"job": "a", "pretrained": "b"}, "--model_args contains both job=DIR and pretrained=DIR"),
    ({"job": "a", "dtype": "float32"}, "--model_args contains dtype='float32'; expected only job"),
    ({"jobs": "a"}, "Did you mean job"),
    ({"job": "a", "mesh": "4,2"}, "mesh is '4,2'; expected 'attached', 'job', or axis sizes"),
    ({"job": "a", "mesh": 8}, "mesh is 8"),
    ({"pretrained": "a", "step": 3}, "step=3 cannot be combined with pretrained=DIR"),
    ({"job": "no_such_job"}, "no_such_job"),
])  # fmt: skip
def test_a_wrong_argument_is_named(given, words):
    with pytest.raises(ConfigError, match=words):
        model_args.model_from_args(given)


def test_a_job_is_loaded_as_the_arguments_say(monkeypatch):
    loads, models = [], []
    monkeypatch.setattr(model_args, "load", lambda *args, **named: loads.append((args, named)))
    monkeypatch.setattr(model_args, "harness_model", lambda model, **named: models.append(named))
    model_args.model_from_args(
        {
            "job": "a",
            "step": 3,
            "mesh": "1x4x2",
            "settings": "run.seed=1",
            "packages": ["mine"],
            "batch_size": "auto:4",
            "max_batch_size": None,
            "device": "cuda:0",
            "add_bos_token": False,
        }
    )
    assert loads[:1] == [
        (
            ("a", 3),
            {
                "mesh": MeshConfig(ici_mesh_shape=(1, 4, 2)),
                "settings": ["run.seed=1"],
                "packages": ["mine"],
            },
        )
    ]
    model_args.model_from_args({"job": "a", "batch_size": "7"})
    assert models == [{"batch_size": 32, "add_bos_token": False}, {"batch_size": 7}]
