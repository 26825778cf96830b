"""Options of XLA reach the steps of their platform, and wrong ones are refused before a step."""

import types

import jax
import numpy as np
import pytest

from praxis_lite import ConfigError
from praxis_lite.core import Partitioner
from praxis_lite.core.partitioner import compiler_options
from praxis_lite.core.partitioner.compiler_options import DECODING, more_options
from praxis_lite.main import main
from praxis_lite.run.experiment.compiler_options import merged_options
from tests.support.explicit_partitioner import explicit_partitioner
from tests.support.lm_runs import batches, partitioner_of, structs
from tests.support.marks import slow_but

TASK = partitioner_of("uneven", "adamw", (1, 4, 2)).task


@pytest.mark.parametrize("kind", slow_but({Partitioner}, [Partitioner, explicit_partitioner]))
def test_options_of_the_platform_reach_its_steps(kind, tmp_path, mesh_of):
    # By its dumps XLA shows that it was told of the folder.
    options = {"cpu": {"xla_dump_to": str(tmp_path)}, "tpu": {"xla_tpu_of_the_future": 1}}
    item = kind(TASK, mesh_of(1, 4, 2), compiler_options=options)
    assert item.compiler_options == options["cpu"]
    batch = structs(batches("uneven")[0])
    for step in ("train", "eval"):
        item.steps[step].lower(batch).compile()
        assert list(tmp_path.glob(f"*jit__{step}_step*"))


@pytest.mark.parametrize("options, said", [
    ({"cpu": {"xla_bogus": 1}}, "cpu.*'xla_bogus'"),
    ({"cpu": {"xla_cpu_enable_fast_math": "maybe"}}, "xla_cpu_enable_fast_math.*'maybe'"),
    ({"cuda": {}}, "'cuda'.*cpu, gpu, tpu"),
    ({"v6": {}}, "'v6'.*v5p, v6e, tpu7x.*Did you mean v6e"),
])
def test_wrong_options_are_refused_before_a_step(options, said, mesh_of):
    with pytest.raises(ConfigError, match=said):
        Partitioner(TASK, mesh_of(1, 4, 2), compiler_options=options)


@pytest.mark.slow
def test_a_job_says_its_options(capsys, tmp_path):
    option = "mesh.compiler_options={'cpu': {'xla_cpu_enable_fast_min_max': False}}"
    main(["--exp=lm.Synthetic", f"--job_log_dir={tmp_path}", "--set", option,
          "run.num_train_steps=1"])
    assert "compiler options: xla_cpu_enable_fast_min_max=False" in capsys.readouterr().out
    assert jax.device_count() == 8


class Tpu:
    """A mesh of a device that is not there: what XLA knows is asked by the test."""

    def __init__(self, kind="TPU v5 lite"):
        self.devices = np.array([types.SimpleNamespace(platform="tpu", device_kind=kind)])


@pytest.mark.parametrize("kind, expected", [
    ("TPU v5 lite", {"a": 1, "b": 3, "c": 4}), ("TPU v6 lite", {"a": 1, "b": 2}),
    ("TPU of next year", {"a": 1, "b": 2}),
])
def test_options_of_a_kind_of_tpu_count_before_those_of_all(kind, expected, monkeypatch):
    compiled = types.SimpleNamespace(lower=lambda: types.SimpleNamespace(compile=lambda: None))
    monkeypatch.setattr(compiler_options, "NamedSharding", lambda *args: None)
    monkeypatch.setattr(jax, "jit", lambda function, **settings: compiled)
    options = {"tpu": {"a": 1, "b": 2}, "v5e": {"b": 3, "c": 4}, "cpu": {"d": 5}}
    assert compiler_options.step_options(options, Tpu(kind)) == expected


def test_options_of_an_experiment_count_before_those_of_its_preset():
    of_preset = {"tpu": {"a": 1, "b": 1}, "v5e": {"c": 1, "d": 1, "e": 1}, "cpu": {"c": 1}}
    own = {"tpu": {"b": 2, "c": 2}, "v5e": {"d": 2}}
    assert merged_options(own, of_preset) == {
        "tpu": {"a": 1, "b": 2, "c": 2}, "v5e": {"d": 2, "e": 1}, "cpu": {"c": 1},
    }
    assert merged_options(None, of_preset) == of_preset
    assert merged_options(own, None) == own


@pytest.mark.parametrize("knows", [True, False])
def test_decoding_has_options_of_its_own_on_tpu_if_xla_knows_them(knows, monkeypatch):
    def checked(options, mesh):
        if not knows:
            raise ConfigError("No such compile option")
        return options["tpu"]

    given = {"xla_tpu_scoped_vmem_limit_kib": 16_384}
    monkeypatch.setattr(compiler_options, "step_options", checked)
    actual = more_options(DECODING, given, Tpu())
    assert given.items() <= actual.items()
    assert ("xla_tpu_enable_dot_strength_reduction" in actual) == knows
    given = {"xla_tpu_enable_dot_strength_reduction": True}  # The user's own count first.
    assert more_options(DECODING, given, Tpu()) == given


def test_decoding_on_other_platforms_has_the_options_of_steps(mesh_of):
    options = {"xla_cpu_enable_fast_min_max": False}
    assert more_options(DECODING, options, mesh_of(1, 4, 2)) == options
    assert more_options(DECODING, None, mesh_of(1, 4, 2)) is None
