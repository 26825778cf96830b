"""Which meshes are chosen, and what a smaller model keeps."""

import fiddle as fdl
import pytest

from praxis_lite import ConfigError
from praxis_lite.config.build import build
from praxis_lite.core import MeshConfig, Partitioner, make_mesh
from praxis_lite.core.partitioner.train_state import layout_and_learner
from praxis_lite.experiment import registry
from praxis_tools.check.meshes import choose_meshes, parse_meshes, reduced_shape
from praxis_tools.check.shrink import FACTORS, shrink_config

AXES = ("replica", "data", "mdl")


def test_meshes_are_read_and_refused_by_word():
    assert parse_meshes("1x4x2, 2x2x2", AXES) == [(1, 4, 2), (2, 2, 2)]
    with pytest.raises(ConfigError, match="'4x2'.*'mdl'.*2x2x2"):
        parse_meshes("1x4x2,4x2", AXES)
    with pytest.raises(ConfigError, match="'1x0x2'"):
        parse_meshes("1x0x2", AXES)


def test_a_large_mesh_is_halved_until_it_fits():
    config = MeshConfig(ici_mesh_shape=(1, 16, 16), axis_names=AXES)
    assert reduced_shape(config, 8) == (1, 2, 4)
    assert reduced_shape(MeshConfig(ici_mesh_shape=(1, 4, 2)), 8) == (1, 4, 2)


def test_each_axis_alone_all_axes_an_uneven_one_and_its_own():
    task = fdl.build(registry.get_experiment("lm.Synthetic")().config()).task
    layout = layout_and_learner(task, {"replica": 1, "data": 4, "mdl": 2})[0]
    actual = choose_meshes((1, 4, 2), layout, 8)
    assert actual[:3] == [(2, 1, 1), (1, 4, 1), (1, 1, 2)]
    assert actual[3] == (2, 2, 2)
    assert actual[-1] == (1, 4, 2)
    # 32 model dims, 64 hidden and 4 heads divide by 2 and 4, and not by 3.
    (uneven,) = set(actual) - {(2, 1, 1), (1, 4, 1), (1, 1, 2), (2, 2, 2), (1, 4, 2)}
    assert 3 in uneven or 5 in uneven or 7 in uneven


def test_a_smaller_model_divides_where_the_large_one_did():
    config = registry.get_experiment("lm.PyDocs")().config()
    small, message = shrink_config(config)
    model, before = small.task.model, config.task.model
    assert (before.model_dims, before.hidden_dims, before.vocab_size) == (97, 389, 257)
    for name in ("model_dims", "hidden_dims", "vocab_size"):
        old, new = getattr(before, name), getattr(model, name)
        assert new < old
        assert [old % n == 0 for n in FACTORS] == [new % n == 0 for n in FACTORS]
        assert f"{name} {old} ({new} was checked)" in message
    assert (model.num_layers, model.num_heads) == (2, 3)
    assert small.datasets["train"].seq_len == 64


def test_a_pipeline_keeps_as_many_layers_as_its_stages_need():
    small, _ = shrink_config(registry.get_experiment("pipelined.PyDocs")().config())
    assert small.task.model.num_layers == 4  # Two stages, each twice.
    build(small)


def test_lengths_that_lines_must_fit_into_stay():
    small, message = shrink_config(registry.get_experiment("huggingface.ChatDpo")().config())
    assert small.datasets["train"].seq_len == 512 and any("model_dims" in line for line in message)
    build(small)


def test_dims_that_pax_names_in_the_singular_shrink_with_the_others():
    small, message = shrink_config(registry.get_experiment("vision.DigitsViT")().config())
    assert "hidden_dim 45 (15 was checked)" in message
    job = build(small)
    partitioner = Partitioner(job.task, make_mesh(MeshConfig(ici_mesh_shape=(1, 1, 1))))
    partitioner.train_step.trace(job.datasets["train"].element_spec())


def test_nothing_to_make_smaller_is_said():
    config = registry.get_experiment("functions.DigitsMlp")().config()
    with pytest.raises(ConfigError, match="--shrink.*model_dims"):
        shrink_config(config)
