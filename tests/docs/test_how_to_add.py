"""docs/how_to_add.md: its blocks, saved under their names, do what their recipes say."""

import dataclasses
import functools
import importlib
import inspect
import re
import shutil
import sys
import tomllib
from pathlib import Path

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from praxis_lite import (
    ConfigError,
    DispatchedStep,
    Hook,
    StepMetrics,
    TrackedRun,
    Tracker,
    inputs,
    layers,
    optimizers,
)
from praxis_lite.core import (
    JobMesh,
    Leaf,
    Learner,
    NnxModel,
    Partitioner,
    rule_shardings,
    share_outputs,
)
from praxis_lite.huggingface import family
from praxis_lite.huggingface.weights import map_tensors, weights_of
from praxis_lite.layers import Linear, set_sharding_params
from praxis_lite.tasks.loss import LossTask
from tests.support.doc_pages import page
from tests.support.job_runs import launch, lines_of, succeed

PAGE = page("how_to_add")
BLOCKS = PAGE.files("python", "toml")


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """A folder on sys.path with the page's files."""
    folder = tmp_path_factory.mktemp("page")
    for name, block in BLOCKS.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(block.text, encoding="utf-8")
    (folder / "your_package/__init__.py").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "your_package"]:
        del sys.modules[name]


def module(name):
    return importlib.import_module(f"your_package.{name}")


def test_the_layers_own_test_passes(folder):
    BLOCKS["tests/test_scaled_sum.py"].run()["test_a_mesh_computes_what_one_device_does"]()


def test_the_layer_decodes_as_it_trains_and_refuses_in_words():
    layer = module("layers").ScaledSum(5, 7, rngs=nnx.Rngs(0))
    x = np.random.default_rng(1).normal(size=(2, 4, 5)).astype(np.float32)
    cache, steps = layer.init_cache(2, 4, jnp.float32), []
    for t in range(4):
        y, cache = layer(x[:, t : t + 1], cache=cache)
        steps.append(y)
    expected = np.cumsum(x @ np.asarray(layer.w[...]), axis=1) / np.arange(1, 5)[None, :, None]
    np.testing.assert_allclose(layer(x)[0], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jnp.concatenate(steps, axis=1), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ConfigError, match="output_dims.*0"):
        module("layers").ScaledSum(5, 0, rngs=nnx.Rngs(0))
    with pytest.raises(ConfigError, match="'y'"):
        layer(x, y=1)


@pytest.mark.slow
def test_presets_lora_int8_and_muon_know_a_layer_that_is_one_einsum(mesh_of):
    build = fdl.Partial(module("projections").ToHeads, 5, 3, 4)
    set_sharding_params(build, "megatron")
    adapted = layers.lora(fdl.build(build), rank=2)
    for model in (
        adapted,
        functools.partial(layers.quantized, model=adapted, rules=(layers.QuantizationRule(""),)),
    ):
        layer = model(rngs=nnx.Rngs(0))
        assert layer.w.get_metadata()["split_dims_mapping"] == (None, "mdl", None)
        assert layer.lora_a.shape == (5, 2) and layer.lora_b.shape == (2, 3, 4)
        assert layer.lora_b.get_metadata()["split_dims_mapping"] == (None, "mdl", None)
        layer.lora_b.set_value(jnp.ones((2, 3, 4)))
        x = np.random.default_rng(2).normal(size=(2, 7, 5)).astype(np.float32)
        w, a = (np.asarray(value[...]) for value in (layer.w, layer.lora_a))
        expected = np.einsum("btd,dnk->btnk", x, w) + (x @ a).sum(-1)[..., None, None]
        error = np.abs(layer(x) - expected).max()
        assert error < 1e-5 if model is adapted else 1e-4 < error < 0.1
    optimizer = functools.partial(
        optax.contrib.muon, muon_weight_dimension_numbers=optimizers.muon_matrices()
    )
    model = NnxModel(fdl.build(build))
    bound = Learner(optimizer, 1.0).bind(model.weight_specs()["params"])
    grad = np.random.default_rng(3).normal(size=(5, 3, 4)).astype(np.float32)
    params = {"w": jnp.zeros((5, 3, 4))}
    new = bound.update({"w": grad}, bound.init(params), params, jnp.float32(1))[0]["w"]
    singular = np.linalg.svd(np.asarray(new).reshape(5, 12), compute_uv=False)
    assert singular.min() > 0.5 * np.sqrt(12 / 5) and singular.max() < 1.3 * np.sqrt(12 / 5)


@pytest.mark.parametrize("adapters_are_inside", [True, False])
def test_a_product_of_ones_own_is_put_before_or_after_adapters(adapters_are_inside):
    clipped = functools.partial(module("products").clipped, limit=0.5)
    base = functools.partial(Linear, 5, 7)
    if adapters_are_inside:
        layer = clipped(base_tpl=layers.lora(base, rank=2), rngs=nnx.Rngs(0))
    else:
        build = functools.partial(clipped, base_tpl=base)
        layer = layers.lora(build, rank=2)(rngs=nnx.Rngs(0))
    layer.lora_b.set_value(jnp.ones((2, 7)))
    x = np.random.default_rng(2).normal(size=(3, 5)).astype(np.float32)
    w, a, b = (np.asarray(value[...]) for value in (layer.w, layer.lora_a, layer.lora_b))
    expected = np.clip(x, -0.5, 0.5) @ w + x @ a @ b
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5, atol=1e-6)


def test_the_optimizer_steps_and_its_slot_splits_as_the_weight(mesh_of):
    def loss(model, batch, key):
        return jnp.mean(jnp.square(model(batch["x"])))

    def model(rngs):
        return Linear(4, 6, weight_split_dims_mapping=("data", "mdl"), rngs=rngs)

    learner = Learner(module("optimizers").signed_mean, learning_rate=0.5)
    task = LossTask(model, loss, learner, inputs_split_mapping={"map_2d": ("data", None)})
    partitioner = Partitioner(task, mesh_of(1, 4, 2))
    specs = {leaf.path: leaf.spec for leaf in partitioner.layout.leaves()}
    (slot,) = [spec for path, spec in specs.items() if "/mean/" in path]
    assert slot == specs["mdl_vars/params/w"] and "data" in slot

    key = partitioner.key(0)
    before = partitioner.init(key)
    old = np.asarray(partitioner.layout.unpad(before).mdl_vars["params"]["w"])
    batch = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    gradient = jax.grad(lambda w: jnp.mean(jnp.square(batch @ w)))(old)
    state, _ = partitioner.train_step(before, partitioner.global_batch({"x": batch}), key)
    new = np.asarray(partitioner.layout.unpad(state).mdl_vars["params"]["w"])
    np.testing.assert_allclose(new, old - 0.5 * np.sign(gradient), rtol=1e-6)
    with pytest.raises(ConfigError, match="decay.*1"):
        module("optimizers").signed_mean(0.1, decay=1)


def test_the_source_gives_batches_that_a_job_can_resume(tmp_path):
    (tmp_path / "a.txt").write_text("1 2\n3 4\n")
    (tmp_path / "b.txt").write_text("5 6\n")
    source = module("sources").NumberedLines(f"{tmp_path}/*.txt")
    pipeline = inputs.FromSource(source, batch_size=2, shuffle=False)
    pipeline.check()
    batches = [pipeline.rows(index, slice(0, 2)) for index in range(2)]
    np.testing.assert_array_equal([b["x"] for b in batches], [[1, 3], [5, 0]])
    np.testing.assert_array_equal([b["weights"] for b in batches], [[1, 1], [1, 0]])
    assert str(tmp_path) not in str(pipeline.fingerprint())


def test_the_family_has_llamas_tensors_but_one_and_its_own_fields(tmp_path, monkeypatch):
    shipped = Path(family.__file__).parent / "families"
    shutil.copytree(shipped, tmp_path / "families")
    (name,) = [name for name in BLOCKS if name.endswith(".toml")]
    (tmp_path / "families" / Path(name).name).write_text(BLOCKS[name].text)
    monkeypatch.setattr(family.resources, "files", lambda package: tmp_path)
    family.families.cache_clear()
    try:
        config = {
            "architectures": ["TernForCausalLM"],
            "vocab_size": 11,
            "width": 8,
            "ffn_width": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
        }
        tern = family.family_of(config)
        settings = tern.decoder_settings(config)
        assert (settings.model_dims, settings.hidden_dims, settings.use_bias) == (8, 16, True)
        llama = tomllib.loads((shipped / "llama.toml").read_text())
        up, own = (f"model.layers.{{layer}}.mlp.{name}.weight" for name in ("up_proj", "ffn_in"))
        assert set(tern.tensors) == {*llama["tensors"], own} - {up}
        shape_of = {x.tensor: x.shape() for x in map_tensors(tern, settings, weights_of(settings))}
        assert shape_of[own.format(layer=0)] == (16, 8)
    finally:
        family.families.cache_clear()


def test_the_rule_splits_where_it_divides_and_says_where_not():
    module("rules")
    mesh = JobMesh({"replica": 1, "data": 4, "mdl": 2})
    leaves = [Leaf("a", (3, 8), np.float32), Leaf("b", (3, 7), np.float32)]
    splits = rule_shardings(leaves, [(".*", 'last_dim_over("data")')], mesh)
    assert splits["a"].spec == (None, "data") and splits["b"].spec == (None, None)
    assert "7 is not divisible by 4" in str(splits["b"])


def test_the_metrics_are_means_over_true_rows_on_a_mesh(mesh_of):
    def loss(model, batch, key):
        logits = jax.nn.one_hot(batch["ids"], 3) * model(batch["x"])[:, None, :]
        share_outputs({"logits": logits})
        return jnp.mean(jnp.square(logits))

    def model(rngs):
        return Linear(4, 3, rngs=rngs)

    local = {"entropy": module("metrics").entropy, "long": module("metrics").accuracy_of_long_rows}
    splits = {"map_2d": (("replica", "data"), None)}
    task = LossTask(
        model,
        loss,
        Learner(module("optimizers").signed_mean, learning_rate=0.5),
        inputs_split_mapping=splits,
        metrics=local,
    )
    random = np.random.default_rng(0)
    weights = np.ones((5, 9), np.float32)
    weights[1, 3:] = 0
    batch = {
        "ids": random.integers(0, 3, (5, 9)),
        "labels": random.integers(0, 3, (5, 9)),
        "x": random.normal(size=(5, 4)).astype(np.float32),
        "weights": weights,
    }
    partitioner = Partitioner(task, mesh_of(1, 4, 2))
    state = partitioner.init(partitioner.key(0))
    w = partitioner.layout.unpad(state).mdl_vars["params"]
    scores = batch["x"] @ np.asarray(w["w"])
    logits = np.eye(3)[batch["ids"]] * scores[:, None, :]
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    is_right = logits.argmax(-1) == batch["labels"]
    inputs = partitioner.global_batch(batch)
    _, outputs = partitioner.train_step(state, inputs, partitioner.key(0))
    actual = {name: outputs["metrics"][name] for name in local}
    entropy = np.average(-(probs * np.log(probs)).sum(-1), weights=weights)
    np.testing.assert_allclose(actual["entropy"], (entropy, weights.sum()), rtol=1e-5)
    long = np.delete(is_right, 1, axis=0)
    np.testing.assert_allclose(actual["long"], (long.mean(), long.size), rtol=1e-5)


@pytest.mark.slow
def test_the_hook_logs_goes_on_where_it_was_and_is_checked(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (words,) = [x for x in PAGE.commands("praxis") if "LoggedSpirals" in " ".join(x)]

    def train(num_steps, every=2):
        return launch(
            *words,
            "--set",
            f"run.num_train_steps={num_steps}",
            f"hooks[0].every={every}",
            "run.log_every_steps=1",
        )

    assert train(4).code == 0
    assert train(6).code == 0
    logged = [text.split(",") for text in Path("loss.csv").read_text().splitlines()]
    losses = {step["step"]: step["loss"] for step in lines_of(Path("spirals/metrics.jsonl"))}
    assert [int(step) for step, _ in logged] == [2, 4, 6]
    np.testing.assert_allclose([float(x) for _, x in logged], [losses[k] for k in (2, 4, 6)], 1e-5)
    refused = train(8, every=0)
    assert refused.code == 2 and "hooks[0].every" in refused.err and "0" in refused.err


def test_the_mode_counts_the_weights_of_an_experiment(capsys, monkeypatch, folder):
    monkeypatch.chdir(folder)
    (words,) = [x for x in PAGE.commands("praxis") if "modes.Weights" in " ".join(x)]
    done = succeed(*(item.replace("lm.PyDocs", "nnx_guide.DotReluDot") for item in words))
    total, *largest = done.out.splitlines()[-3:]
    assert total == "2,097,152 weights in 2 arrays"
    assert all("1,048,576  mdl_vars/params/" in text for text in largest) and len(largest) == 2


@pytest.mark.parametrize("base", [Hook, Tracker])
def test_each_method_of_a_hook_and_a_tracker_is_in_the_pages_table(base):
    section = PAGE.text[PAGE.text.index(f"The methods of `{base.__name__}`") :].split("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)\(([^)]*)\)` \|", section, re.MULTILINE))
    for name, member in inspect.getmembers(base, inspect.isfunction):
        if name[0] != "_" or name == "__exit__":
            _, *parameters = inspect.signature(member).parameters.values()
            assert rows.pop(name) == ", ".join(str(item).partition(":")[0] for item in parameters)
    assert list(rows) == ["__enter__"] * (base is Hook)
    for named, argument in (
        ("DispatchedStep", DispatchedStep),
        ("StepMetrics", StepMetrics),
        ("TrackedRun", TrackedRun),
    ):
        if named in section:
            fields = re.search(rf"`{named}`: ((?:`\w+`(?:, )?)+)", section)[1]
            assert re.findall(r"\w+", fields) == [x.name for x in dataclasses.fields(argument)]
