"""A config written, read again, and refused if its text names more than it may."""

import copy
import functools
import shlex

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from praxis_lite import ConfigError, Job, RunConfig
from praxis_lite.config.config_json import (
    config_difference,
    config_lines,
    dump_config,
    load_config,
)
from praxis_lite.config.experiment_overrides import configured
from praxis_lite.config.overrides import apply_overrides
from praxis_lite.config.settings_file import settings_in_file
from praxis_lite.experiment import registry
from praxis_lite.experiments.lm import PyDocs
from tests.support import callables as zoo
from tests.support.marks import slow_but

NAME = "tests.support.callables.Mine"


def again(config):
    return load(dump_config(config, NAME)).config


def load(text):
    return load_config(text, packages=["tests"])


def job(**changes):
    corpus = fdl.Config(zoo.Corpus, path="a.txt")
    parts = dict(
        mesh=fdl.Config(zoo.Mesh, ici_mesh_shape=(1, 4, 2)),
        task=fdl.Partial(zoo.Layer, width=37, note="it's $HOME", split=(None, "mdl")),
        datasets={"train": fdl.Config(zoo.Pipeline, corpus), "eval": fdl.Config(zoo.chain, corpus)},
        decode_datasets={},
        run=fdl.Config(RunConfig, num_train_steps=257),
    )
    return fdl.Config(Job, **{**parts, **changes})


def clip():
    return fdl.Config(optax.clip_by_global_norm, 1.0)


VALUES = [
    None,
    True,
    7,
    0.1,
    float("inf"),
    "text",
    (1, (2, None), "a"),
    [(1,), {"k": (2,)}],
    {7: "b", 13: None},
    {7, 13},
    slice(1, 7),
    int,
    jnp.bfloat16,
    jnp.float32,
    np.float32,
    np.dtype("float32"),
    jnp.dtype("bfloat16"),
    jax.sharding.PartitionSpec(("data", "mdl"), None, "replica"),
    {"w": [jax.sharding.PartitionSpec()]},
    jax.nn.gelu,
    jax.nn.relu,
    jax.nn.silu,
    jnp.tanh,
    jnp.add,
    np.sqrt,
    jax.checkpoint_policies.dots_saveable,
    jax.lax.Precision.HIGHEST,
    optax.adamw,
    zoo.Color.BLUE,
    zoo.jitted,
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_value_survives(value):
    config = fdl.Config(zoo.chain, value)
    actual = fdl.build(again(config))[0]
    assert actual == value and type(actual) is type(value) and repr(actual) == repr(value)
    assert again(config) == config


@pytest.mark.parametrize("function", [optax.adamw, jax.nn.gelu, zoo.jitted, zoo.Layer])
def test_configs_and_partials_of_functions_survive(function):
    for kind in (fdl.Config, fdl.Partial):
        actual = again(fdl.Config(zoo.chain, kind(function)))[0]
        assert type(actual) is kind and fdl.get_callable(actual) is function


def test_a_functools_partial_survives_with_what_it_holds():
    inner = functools.partial(jax.nn.one_hot, num_classes=7, dtype=np.dtype("float32"))
    value = functools.partial(zoo.power, 7, exponent=inner)
    actual = again(fdl.Config(zoo.chain, value, value))
    assert actual[0] is actual[1] and isinstance(actual[0], functools.partial)
    assert (actual[0].func, actual[0].args) == (zoo.power, (7,))
    inside = actual[0].keywords["exponent"]
    assert inside.func is jax.nn.one_hot
    assert inside.keywords == {"num_classes": 7, "dtype": np.dtype("float32")}


def test_an_optax_chain_survives_and_updates_alike():
    config = fdl.Config(
        optax.chain,
        clip(),
        fdl.Config(optax.adamw, fdl.Config(optax.cosine_decay_schedule, 0.1, 13), b2=0.95),
    )
    updates = []
    for item in (config, again(config)):
        optimizer = fdl.build(item)
        params = {"w": jnp.arange(7.0)}
        updates.append(optimizer.update(params, optimizer.init(params), params)[0]["w"])
    np.testing.assert_array_equal(*updates)


def test_a_whole_job_survives_with_its_record_and_shared_parts():
    loaded = load(dump_config(job(), NAME, ["run.seed=7"]))
    assert (loaded.config, loaded.experiment, loaded.overrides) == (job(), NAME, ("run.seed=7",))
    assert loaded.config.datasets["train"].corpus is loaded.config.datasets["eval"][0]
    loaded.config.datasets["train"].corpus.path = "b"
    assert loaded.config.datasets["eval"][0].path == "b"


def test_dumping_leaves_the_config_as_it_was_and_is_deterministic():
    config = job(task=fdl.Config(zoo.chain, np.dtype("float32"), jax.nn.relu))
    first = dump_config(config, NAME)
    assert config.task[0] is np.dtype("float32") and dump_config(config, NAME) == first


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (lambda x: x, "not defined at the top level of a module"),
        (np.ones(7), "<numpy.ndarray>"),
        (np.float32(7), "<numpy.float32>"),
        (zoo.Mesh((1, 1, 1)), "<tests.support.callables.Mesh>"),
        (jax.jit(lambda x: x), "not defined at the top level of a module"),
    ],
    ids=lambda value: str(type(value)),
)
def test_what_text_cannot_hold_is_refused_by_path(value, words):
    with pytest.raises(ConfigError) as caught:
        dump_config(job(datasets={"train": fdl.Config(zoo.Pipeline, [value])}), NAME)
    assert str(caught.value).startswith("datasets.train.corpus[0] is ")
    assert words in str(caught.value)


def with_corpus(module, name):
    return dump_config(job(), NAME).replace("tests.support.callables:Corpus", f"{module}:{name}")


def test_a_foreign_package_is_refused_at_the_start_and_can_be_allowed():
    config = fdl.Config(zoo.chain, [fdl.Config(pytest.approx, 7)])
    with pytest.raises(ConfigError, match=r"\[0\]\[0\].*_pytest"):
        dump_config(config, NAME)
    text = dump_config(config, NAME, packages=["_pytest"])
    assert load_config(text, packages=["_pytest", "tests"]).config == config


def test_code_that_has_changed_is_named():
    gone = r"config\.json contains tests\.support\.callables\.{}, "
    with pytest.raises(ConfigError, match=gone.format("Gone")):
        load(with_corpus("tests.support.callables", "Gone"))
    with pytest.raises(ConfigError, match=gone.format(r"gone\.Corpus")):
        load(with_corpus("tests.support.callables.gone", "Corpus"))
    with pytest.raises(ConfigError, match=r"corpus\.path.*config\.json"):
        load(with_corpus("tests.support.callables", "Mesh"))


def test_every_line_can_be_pasted_behind_set():
    config = job(decode_datasets={"p": fdl.Config(zoo.loose, names=("a b", "c"), extra_one=7)})
    assert len(config_lines(config)) > 40
    _check_lines(config)


QUICK = {"lm.PyDocs", "seq2seq.Reverse", "moe.Synthetic", "linen.PyDocs", "vision.DigitsResNet"}


@pytest.mark.parametrize("name", slow_but(QUICK, registry.list_experiments()))
def test_every_line_of_every_experiment_can_be_pasted_behind_set(name):
    _check_lines(registry.get_experiment(name)().config())


def _check_lines(config):
    lines = config_lines(config)
    assert not [line for line in lines if "<" in line]
    changed = copy.deepcopy(config)
    for line in lines:
        (setting,) = shlex.split(line)  # What the shell makes of the line.
        apply_overrides(changed, [setting], ["tests"])
    assert config_lines(changed) == lines
    assert changed == config  # A default stays unset.


def test_the_lines_of_one_job_make_another_the_same(tmp_path):
    settings = [
        "task.learner.optimizer=optax.contrib.muon", "task.model.final_ln_tpl=LayerNorm",
        "task.model.final_ln_tpl.use_bias=false", "task.learner.learning_rate=constant_schedule()",
        "task.learner.learning_rate.value=0.5", "run.stopping.early=EarlyStopping",
        "task.model.stacked_transformer_tpl=StackedTransformer", "task.decoder=BeamSearch",
        "run.stopping.early.metric=loss", "datasets.train.corpus.files=x y.txt",
    ]  # fmt: skip
    config = configured(PyDocs, settings)
    lines = config_lines(config)
    (tmp_path / "config.txt").write_text("\n".join(lines))
    again = configured(PyDocs, settings_in_file(tmp_path / "config.txt"))
    assert config_lines(again) == lines != config_lines(PyDocs().config())
    assert config_difference(config, again) == []


def test_the_lines_show_defaults_in_the_order_of_the_roots():
    lines = config_lines(job())
    roots = list(dict.fromkeys(line.partition("=")[0].partition(".")[0] for line in lines))
    assert roots == ["mesh", "task", "datasets", "decode_datasets", "run", "partitioner", "hooks"]
    expected = {
        "mesh='tests.support.callables.Mesh()'",
        "mesh.ici_mesh_shape=1,4,2",
        "mesh.dcn_mesh_shape=None",
        "mesh.axis_names=replica,data,mdl",
        "task.activation=jax.nn.gelu",
        "task.dtype=bfloat16",
        "task.kind=rotary",
        "task.rate=0.5",
        "datasets.train.corpus.options='{}'",
        "datasets.eval[0].path=a.txt",
        "run.seed=0",
        "run.evaluation.every_steps=None",
        "partitioner=None",
    }
    assert expected <= set(lines)


def test_the_difference_names_what_changed_and_nothing_else():
    old, new = job(), job()
    assert config_difference(old, again(new)) == []
    apply_overrides(new, ["run.num_train_steps=400", "datasets.train.corpus.path=b.txt"])
    new.task.activation = jax.nn.relu
    new.decode_datasets["more"] = fdl.Config(zoo.Corpus, path="c")
    assert config_difference(old, new) == [
        "task.activation: jax.nn.gelu -> jax.nn.relu",
        "datasets.train.corpus.path: a.txt -> b.txt",
        "datasets.eval[0].path: a.txt -> b.txt",
        "decode_datasets.more: (absent) -> tests.support.callables.Corpus()",
        "decode_datasets.more.path: (absent) -> c",
        "decode_datasets.more.options: (absent) -> {}",
        "run.num_train_steps: 257 -> 400",
        "task.activation.approximate: True -> (absent)",
        "decode_datasets: {} -> (below)",
    ]


def test_defaults_that_miss_their_annotation_are_shown_all_the_same():
    config = job(task=fdl.Config(zoo.odd))
    assert [line for line in config_lines(config) if line.startswith("task.")] == [
        "task.rate=1",
        "task.width=None",
        "task.name=7",
        "task.pair=1,0.5",
    ]
