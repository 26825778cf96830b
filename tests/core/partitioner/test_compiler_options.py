"""Options of XLA reach the steps of their platform, and wrong ones are refused before a step."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from praxis_lite import ConfigError
from praxis_lite.core import Learner, Partitioner
from praxis_lite.core.partitioner import compiler_options
from praxis_lite.core.partitioner.compiler_options import DECODING, more_options
from praxis_lite.core.sharding.mesh_config import merged_options
from praxis_lite.main import main
from praxis_lite.models import FunctionModel
from praxis_lite.tasks.loss import LossTask
from tests.support.explicit_partitioner import explicit_partitioner
from tests.support.on_tpu import needs_libtpu, printed_by

DIMS = 7
TASK = LossTask(
    FunctionModel(lambda key: {"w": jnp.ones(DIMS)}),
    lambda params, inputs, key: jnp.square(inputs["x"] @ params["w"]),
    Learner(optax.sgd, 0.1),
)


@pytest.mark.parametrize("kind", [Partitioner, explicit_partitioner])
def test_options_of_the_platform_reach_its_steps(kind, tmp_path, mesh_of):
    # By its dumps XLA shows that it was told of the folder.
    options = {"cpu": {"xla_dump_to": str(tmp_path)}, "tpu": {"xla_tpu_of_the_future": 1}}
    item = kind(TASK, mesh_of(1, 4, 2), compiler_options=options)
    assert item.compiler_options == options["cpu"]
    batch = {"x": jax.ShapeDtypeStruct((8, DIMS), jnp.float32)}
    for step in ("train", "eval"):
        item.steps[step].lower(batch).compile()
        assert list(tmp_path.glob(f"*jit__{step}_step*"))


@pytest.mark.parametrize(
    "options, said",
    [
        (
            {"cpu": {"xla_cpu_fast_math": 1}},
            "cpu.*xla_cpu_fast_math is no.*xla_cpu_enable_fast_math",
        ),
        ({"cpu": {"xla_gpu_graph_level": 0}}, "graph_level.*xla_gpu_enable_command_buffer"),
        (
            {"cpu": {"xla_bogus": 1, "xla_dump_to": "", "xla_more": 1}},
            "xla_bogus is no.*xla_more is",
        ),
        ({"cpu": {"xla_cpu_enable_fast_math": "maybe"}}, "xla_cpu_enable_fast_math.*'maybe'"),
        ({"cuda": {}}, "'cuda'.*cpu, gpu, tpu"),
        ({"v6": {}}, "'v6'.*v5p, v6e, tpu7x.*Did you mean v6e"),
    ],
)
def test_wrong_options_are_refused_before_a_step(options, said, mesh_of):
    with pytest.raises(ConfigError, match=said):
        Partitioner(TASK, mesh_of(1, 4, 2), compiler_options=options)


@pytest.mark.slow
def test_a_job_says_its_options(capsys, tmp_path):
    option = "mesh.compiler_options={'cpu': {'xla_cpu_enable_fast_min_max': False}}"
    main(
        [
            "--exp=lm.Synthetic",
            f"--job_log_dir={tmp_path}",
            "--set",
            option,
            "run.num_train_steps=1",
        ]
    )
    assert "compiler options: xla_cpu_enable_fast_min_max=False" in capsys.readouterr().out
    assert jax.device_count() == 8


class Tpu:
    """A mesh of a device that is not there: what XLA knows is asked by the test."""

    def __init__(self, kind="TPU v5 lite"):
        self.devices = np.array([types.SimpleNamespace(platform="tpu", device_kind=kind)])


def taking(monkeypatch, names):
    """Makes the compiler one that knows these options alone."""

    def refusal(options, mesh):
        unknown = [name for name, _ in options if name not in names]
        return f"No such compile option: '{unknown[0]}'" if unknown else None

    monkeypatch.setattr(compiler_options, "_rejection", refusal)


@pytest.mark.parametrize(
    "kind, expected",
    [
        ("TPU v5 lite", {"a": 1, "b": 3, "c": 4}),
        ("TPU v6 lite", {"a": 1, "b": 2}),
        ("TPU of next year", {"a": 1, "b": 2}),
    ],
)
def test_options_of_a_kind_of_tpu_count_before_those_of_all(kind, expected, monkeypatch):
    taking(monkeypatch, "abcd")
    options = {"tpu": {"a": 1, "b?": 2}, "v5e": {"b": 3, "c?": 4}, "cpu": {"d": 5}}
    assert compiler_options.step_options(options, Tpu(kind)) == expected


def test_an_option_that_xla_may_lack_is_left_out_with_a_warning(caplog, mesh_of):
    options = {"xla_of_next_year?": 1, "xla_cpu_enable_fast_min_max?": False}
    for _ in range(2):  # It is said once.
        item = Partitioner(TASK, mesh_of(1, 4, 2), compiler_options={"cpu": options})
        assert item.compiler_options == {"xla_cpu_enable_fast_min_max": False}
    (message,) = [record.message for record in caplog.records]
    assert "mesh.compiler_options of cpu: xla_of_next_year=1 is omitted" in message
    assert "jaxlib" in message


def test_a_users_own_option_is_refused_beside_a_presets_that_is_left_out(monkeypatch, caplog):
    taking(monkeypatch, "ac")
    options = {"tpu": {"a?": 1, "b?": 2, "c": 3}}
    assert compiler_options.step_options(options, Tpu()) == {"a": 1, "c": 3}
    assert "b=2 is omitted. b is not an option of XLA in libtpu" in caplog.text
    with pytest.raises(ConfigError, match="v5e: d is not an option") as refused:
        compiler_options.step_options({"tpu": {"a?": 1, "b?": 2}, "v5e": {"d": 3}}, Tpu())
    assert "b is not an option" not in str(refused.value)
    with pytest.raises(ConfigError, match="v5e: b is not an option"):  # What is said last counts.
        compiler_options.step_options({"tpu": {"b?": 2}, "v5e": {"b": 3}}, Tpu())


@pytest.mark.slow
@needs_libtpu
def test_the_installed_libtpu_has_every_option_of_presets_and_plans():
    """What fails here was renamed: COMPILER_OPTIONS, PLANNING_OPTIONS, DECODING, ACCUMULATING."""
    given, left_out = printed_by("tests.support.preset_options")
    assert given >= 9 and left_out == []


def test_options_of_an_experiment_count_before_those_of_its_preset():
    of_preset = {"tpu": {"a": 1, "b": 1}, "v5e": {"c": 1, "d": 1, "e": 1}, "cpu": {"c": 1}}
    own = {"tpu": {"b": 2, "c": 2}, "v5e": {"d": 2}}
    assert merged_options(own, of_preset) == {
        "tpu": {"a": 1, "b": 2, "c": 2},
        "v5e": {"d": 2, "e": 1},
        "cpu": {"c": 1},
    }
    assert merged_options(None, of_preset) == of_preset
    assert merged_options(own, None) == own


def test_a_presets_option_is_the_users_own_whatever_ends_their_names():
    assert merged_options({"tpu": {"a": 1}}, {"tpu": {"a?": 2, "b?": 2}, "v5e": {"a?": 3}}) == {
        "tpu": {"a": 1, "b?": 2},
        "v5e": {},
    }


@pytest.mark.parametrize("knows", [True, False])
def test_decoding_has_options_of_its_own_on_tpu_if_xla_knows_them(knows, monkeypatch, caplog):
    given = {"xla_tpu_scoped_vmem_limit_kib": 16_384}
    name = "xla_tpu_enable_dot_strength_reduction"
    taking(monkeypatch, {*given, *([name] if knows else [])})
    actual = more_options(DECODING, given, Tpu())
    assert actual == given | ({name: False} if knows else {})
    if not knows:
        assert f"{name}=False is omitted" in caplog.text
        return
    assert more_options(DECODING, {name: True}, Tpu()) == {name: True}  # The user's own.


def test_decoding_on_other_platforms_has_the_options_of_steps(mesh_of):
    options = {"xla_cpu_enable_fast_min_max": False}
    assert more_options(DECODING, options, mesh_of(1, 4, 2)) == options
    assert more_options(DECODING, None, mesh_of(1, 4, 2)) is None
