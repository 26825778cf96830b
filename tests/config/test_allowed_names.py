"""The names that a config may have: what computes, and nothing that acts."""

from pathlib import Path

import pytest

from praxis_lite import ConfigError
from praxis_lite.config import json_nodes
from praxis_lite.inputs import JsonLines, Parquet

REFUSED = """
    builtins:eval builtins:open builtins:getattr os:remove shutil:rmtree pathlib:Path.unlink
    subprocess:run importlib:import_module fiddle:build functools:partial jax:config
    praxis_lite:load praxis_lite:register praxis_lite:Checkpoints praxis_lite.core:simulate_devices
    praxis_lite.inputs:language_reference praxis_tools.check:check_on_meshes
    praxis_lite.main:main praxis_lite.job.job_dir:open_for_training
    praxis_lite.experiments.lm:fdl praxis_lite.experiments.lm:fdl.build
    praxis_lite.experiments.lm:PyDocs.__init__ praxis_lite_evil:f
    jax.numpy:save jax.numpy:load jax.numpy:zeros numpy:save numpy:memmap numpy:fromfile
    flax.linen:tabulate flax.nnx:jit jax.profiler:start_server jax.lax:linalg
    optax:_src.base.identity jax._src.nn.functions:gelu zoo:x a..b:c os.system \uff4fs:system
"""


@pytest.mark.parametrize("symbol", REFUSED.split())
def test_what_acts_is_refused(symbol):
    module, _, name = symbol.partition(":")
    with pytest.raises(ConfigError, match=f"config.json contains {module}.{name},"):
        json_nodes.read({"name": symbol}, ())


@pytest.mark.parametrize(
    "symbol",
    [
        "optax:adamw",
        "optax:warmup_cosine_decay_schedule",
        "optax.contrib:dog",
        "jax.nn:gelu",
        "builtins:dict",
        "jax.nn.initializers:normal",
        "praxis_lite.layers:WeightInit.Xavier",
        "jax.numpy:tanh",
        "numpy:float32",
        "praxis_lite.tasks.language_model:LanguageModelTask",
        "praxis_lite.experiments.functions:init",
    ],
)
def test_what_computes_may_be_named_and_called(symbol):
    json_nodes.read({"Config": symbol, "arguments": {}}, ())


def test_a_name_in_other_letters_is_the_first_that_may_be_meant():
    from praxis_lite.config.named_values import suggestion

    assert suggestion("adamW", None, None).startswith(" Did you mean adamw")
    # Names of ours are known before they are loaded.
    assert suggestion("LayerNrm", None, None).startswith(" Did you mean LayerNorm")
    assert suggestion("JsonLine", None, None).startswith(" Did you mean JsonLines")


@pytest.mark.parametrize(
    "source, name",
    [
        (JsonLines, "a.jsonl"),
        (JsonLines, "a.jsonl.gz"),
        (JsonLines, "a.jsonl.zst"),
        (Parquet, "a.parquet"),
    ],
)
def test_the_examples_that_a_function_returns_are_the_files(tmp_path, source, name):
    def make(folder):
        return ({"text": f"number {i}"} for i in range(137))

    result = source(f"{tmp_path}/{name}", make=make)
    assert len(result) == 137 and result[131] == {"text": "number 131"}


def test_a_function_that_makes_files_writes_over_none(tmp_path):
    (tmp_path / ".profile").write_text("precious")

    def make(folder):
        Path(folder, ".profile").write_text("evil")

    with pytest.raises(ConfigError, match=r"\.profile .*`make`"):
        len(JsonLines(f"{tmp_path}/*.jsonl", make=make))
    assert (tmp_path / ".profile").read_text() == "precious"
    with pytest.raises(ConfigError, match=r"a\.txt'.*\.jsonl"):
        len(JsonLines(f"{tmp_path}/a.txt", make=lambda folder: iter([{"text": "b"}])))
