"""`--set`: every field within reach, every value checked."""

import dataclasses
import math
import re

import fiddle as fdl
import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite import ConfigError, Job, RunConfig, StopSettings
from praxis_lite.config.overrides import apply_overrides, check_required
from praxis_lite.config.paths import iterate_fields
from praxis_lite.core import Learner, MeshConfig
from praxis_lite.decode import Greedy
from praxis_lite.tasks.language_model import LanguageModelTask
from tests.support import callables as zoo


def job():
    corpus = fdl.Config(zoo.Corpus, path="a.txt")
    return fdl.Config(
        Job,
        mesh=fdl.Config(zoo.Mesh, ici_mesh_shape=(1, 4, 2)),
        task=fdl.Config(
            zoo.chain, fdl.Partial(zoo.Layer, width=37), fdl.Config(zoo.loose, scale=2.0)
        ),
        datasets={
            "train": fdl.Config(zoo.Pipeline, corpus),
            "held-out": fdl.Config(zoo.Pipeline, corpus, schedule=fdl.Partial(zoo.power)),
        },
        decode_datasets={},
        run=fdl.Config(RunConfig, num_train_steps=257),
    )


def layer_with(setting):
    config = job()
    apply_overrides(config, [f"task[0].{setting}"])
    return fdl.build(config.task[0])().given


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("width=7", 7),
        ("rate=3", 3.0),
        ("rate=1e-3", 0.001),
        ("rate=-inf", -math.inf),
        ("use_bias=false", False),
        ("use_bias=True", True),
        ("name=two words", "two words"),
        ("name='quoted'", "quoted"),
        ("name=13", "13"),
        ("name=none", "none"),
        ("name=a=b", "a=b"),
        ("note=None", None),
        ("note='None'", "None"),
        ("note=1,2", "1,2"),
        ("split=None", None),
        ("split=None,mdl", (None, "mdl")),
        ("split=(None, 'mdl')", (None, "mdl")),
        ("split=['data', -1]", ["data", -1]),
        ("split=mdl,", ("mdl",)),
        ("kind=learned", "learned"),
        ("kind=none", "none"),
        ("pair=(13, 'y')", (13, "y")),
        ("pair[0]=13", (13, "x")),
        ("pair.1=y", (7, "y")),
        ("pair[-1]=y", (7, "y")),
        ("table={'a': 13}", {"a": 13}),
        ("dtype=float32", jnp.float32),
        ("dtype='float16'", jnp.float16),
        ("either=13", 13),
        ("either=x", "x"),
        ("either=none", None),
        ("color=BLUE", zoo.Color.BLUE),
        ("anything=[1, 'a']", [1, "a"]),
    ],
)
def test_a_value_is_read_as_the_annotation_says(setting, value):
    actual = layer_with(setting)[setting.split("=")[0].split("[")[0].split(".")[0]]
    assert actual == value and type(actual) is type(value)
    if isinstance(value, tuple):
        assert [type(item) for item in actual] == [type(element) for element in value]


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("width=7.0", "int"),
        ("width=true", "int"),
        ("width=seven", "int"),
        ("width=None", "int"),
        ("rate=fast", "float"),
        ("rate=true", "float"),
        ("use_bias=1", "true or false"),
        ("use_bias=yes", "true or false"),
        ("split=mdl", "Sequence[str | int | None] | None; write a sequence of one item as mdl,"),
        ("split=(1.5,)", "Sequence[str | int | None] | None"),
        ("kind=rotray", "one of rotary, learned, none"),
        ("pair=(13, 7)", "tuple[int, str]"),
        ("pair=(13, 'y', 7)", "tuple[int, str]"),
        ("pair[0]=y", "int"),
        ("table={'a': 'b'}", "Mapping[str, int] | None"),
        ("dtype=float33", "the name of a dtype, such as float32 or bfloat16"),
        ("dtype=7", "the name of a dtype, such as float32 or bfloat16"),
        ("color=GREEN", "Color"),
    ],
)
def test_a_wrong_type_names_path_value_and_type(setting, expected):
    path, _, text = setting.partition("=")
    with pytest.raises(ConfigError) as caught:
        layer_with(setting)
    message = f"task[0].{path}: found {text!r}, expected {expected}. The current value is"
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("count=13", 13),
        ("scale=13", 13.0),
        ("names=c,d,e", ("c", "d", "e")),
        ("dtype=float64", np.float64),
        ("flag=true", True),
        ("new_one=37", 37),
    ],
)
def test_without_annotation_the_default_gives_the_type(setting, value):
    config = job()
    apply_overrides(config, [f"task.1.{setting}"])
    actual = getattr(config.task[1], setting.split("=")[0])
    assert actual == value and type(actual) is type(value)


@pytest.mark.parametrize("setting", ["count=1.5", "scale=x", "names=1,2", "flag=1", "new_one=x"])
def test_without_annotation_another_type_is_refused(setting):
    name, value = setting.split("=")
    with pytest.raises(ConfigError, match=rf"task\[1\]\.{name}.*{value}"):
        apply_overrides(job(), [f"task.1.{setting}"])


def test_changes_are_applied_in_order():
    config = job()
    apply_overrides(
        config,
        [
            "run.num_train_steps=13",
            "run.num_train_steps=7",
            "mesh.ici_mesh_shape[1]=3",
            "mesh.dcn_mesh_shape=1,1,1",
            "datasets.held-out.batch_size=37",
        ],
    )
    built = fdl.build(config)
    assert built.run == RunConfig(num_train_steps=7)
    assert built.mesh == zoo.Mesh((1, 3, 2), (1, 1, 1))
    assert (built.datasets["train"].batch_size, built.datasets["held-out"].batch_size) == (7, 37)


def test_a_shared_config_stays_shared():
    config = job()
    apply_overrides(config, ["datasets.train.corpus.path=b.txt"])
    built = fdl.build(config)
    assert built.datasets["held-out"].corpus is built.datasets["train"].corpus
    assert built.datasets["held-out"].corpus.path == "b.txt"


def test_defaults_and_containers_of_the_code_are_never_changed():
    options = {"a": 7}
    config = job()
    config.datasets["train"].corpus.options = options
    apply_overrides(config, ["datasets.train.corpus.options.a=13", "mesh.axis_names.2=model"])
    assert fdl.build(config).datasets["train"].corpus.options == {"a": 13}
    assert options == {"a": 7}
    assert config.mesh.axis_names == ("replica", "data", "model")
    assert zoo.Mesh((1, 1, 1)).axis_names == ("replica", "data", "mdl")


def test_a_config_gives_way_only_to_a_name_or_to_what_its_annotation_says():
    config = job()
    apply_overrides(config, ["datasets.held-out.schedule=1e-3"])
    assert config.datasets["held-out"].schedule == 0.001
    for path in ("run=7", "task.0=7", "datasets.train.corpus=a.txt"):
        with pytest.raises(ConfigError, match=r"optax\.lion"):
            apply_overrides(job(), [path])
    with pytest.raises(ConfigError, match="datasets .*--set"):
        apply_overrides(job(), ["datasets={}"])


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("run.num_trainsteps", "run.num_train_steps"),
        ("num_train_steps", "run.num_train_steps"),
        ("run.checkpoints.every_step", "run.checkpoints.every_steps"),
        ("datasets.training.batch_size", "datasets.train.batch_size"),
        ("dataset.train.corpus.path", "datasets.train.corpus.path"),
        ("mesh.ici_mesh_shape[3]", "mesh.ici_mesh_shape"),
        ("run.seed.x", "run.seed"),
        ("task[0].widht", "task[0].width"),
    ],
)
def test_a_wrong_path_lists_the_nearest_first_and_five_at_most(path, nearest):
    with pytest.raises(ConfigError) as caught:
        apply_overrides(job(), [f"{path}=7"])
    listed = str(caught.value).partition("Similar fields: ")[2].rstrip(".").split(", ")
    assert listed[0] == nearest and len(listed) <= 5


@pytest.mark.parametrize("path", ["", "x..y", "run[", ".run", "[0]", "run.seed]", "qqqq"])
def test_a_path_like_none_lists_the_roots_or_the_form(path):
    with pytest.raises(ConfigError, match=f"--set {re.escape(path)}[=:]"):
        apply_overrides(job(), [f"{path}=7"])


def test_a_setting_without_a_value_is_refused():
    for settings, meant in {
        ("run.seed",): "run.seed=VALUE",
        ("run.seed", "20"): "run.seed=20",
        ("run.seed", "=", "20"): "run.seed=20",
        ("run.seed:20",): "run.seed=20",
    }.items():
        words = f"--set run.seed.*'='.*path=value.* --set {meant},"
        with pytest.raises(ConfigError, match=words):
            apply_overrides(job(), settings)


@pytest.mark.parametrize("mapping", ["weight", "activation"])
def test_a_field_of_paxs_below_a_split_dims_mapping_is_told_to_be_the_mapping(mapping):
    path = f"task[0].{mapping}_split_dims_mapping"
    words = f"--set {re.escape(path)}=data,mdl"
    with pytest.raises(ConfigError, match=words):
        apply_overrides(job(), [f"{path}.wt=data,mdl"])


@pytest.mark.parametrize(
    ("configured", "setting", "words"),
    [
        (Learner, "learning_rate=fast", r"learning_rate.*float.*optax\.lion"),
        (StopSettings, "early=true", "None.*EarlyStopping"),
        (MeshConfig, "ici_mesh_shape=1x2x1", "Sequence.int."),
    ],
)
def test_a_wrong_value_is_told_what_may_stand_there_in_words(configured, setting, words):
    with pytest.raises(ConfigError, match=words):
        apply_overrides(fdl.Config(configured), [setting])


def test_all_paths_holds_defaults_positions_and_names():
    paths = [field.path for field in iterate_fields(job())]
    expected = {
        "run.seed",
        "mesh.dcn_mesh_shape",
        "task[0].activation",
        "task[1].count",
        "datasets.held-out.corpus.path",
        "datasets.held-out.schedule.exponent",
        "datasets.train.corpus.options",
    }
    assert expected <= set(paths) and len(paths) == len(set(paths))


def test_required_fields_of_configs_are_asked_for_those_of_partials_are_not():
    check_required(job())  # zoo.power's `step` comes from its caller.
    config = job()
    del config.run.num_train_steps
    del config.datasets["train"].corpus.path
    with pytest.raises(ConfigError, match=r"datasets\.train\.corpus\.path.*run\.num_train_steps"):
        check_required(config)
    apply_overrides(config, ["run.num_train_steps=7", "datasets.train.corpus.path=c"])
    check_required(config)


@pytest.mark.parametrize(
    "setting",
    [
        "task.__class__=1",
        "task.__init__.__globals__=1",
        "decode_datasets.p.__arguments__=7",
        "datasets[train].__dict__=7",
        "task.activation=os.system",
        "task.activation=numpy.save()",
        "task=os",
        "run.seed=__import__('os').system('touch canary')",
        "run.seed=" + "(" * 9_999,
        "task.color=__class__",
        "run.seed\x1b[2J=1",
        "run.seed=\x1b[2J",
    ],
)
def test_a_setting_reaches_only_fields_and_names_only_what_is_allowed(setting):
    config, untouched = hostile_job(), hostile_job()
    with pytest.raises(ConfigError, match=r"^[^\x1b]*$"):
        apply_overrides(config, [setting])
    assert config == untouched


LITERALS = ["os.system", "__import__('os')", "{1: [2]}", "1e999", "[" * 9_999]


@pytest.mark.parametrize("text", LITERALS, ids=lambda text: text[:24])
def test_a_value_for_anything_is_a_literal_or_a_word(text):
    config = hostile_job()
    apply_overrides(config, [f"task.anything={text}"])
    assert type(config.task.anything) in (str, dict, float)


def hostile_job():
    return fdl.Config(
        Job, mesh=fdl.Config(zoo.Mesh, ici_mesh_shape=(1, 4, 2)), task=fdl.Config(zoo.Layer),
        datasets={"train": fdl.Config(zoo.Pipeline, fdl.Config(zoo.Corpus, path="a"))},
        decode_datasets={"p": fdl.Config(zoo.loose)}, run=fdl.Config(RunConfig, num_train_steps=7),
    )  # fmt: skip


@dataclasses.dataclass(eq=False)
class _Windows:
    seq_len: int
    stride: int | None = None


class _Own(_Windows):
    def __init__(self, name: str, width: int):
        super().__init__(width)
        self.name = name


def test_a_subclass_of_a_dataclass_with_its_own_constructor_has_its_types():
    config = fdl.Config(_Own, name="a", width=7)
    apply_overrides(config, ["name=37", "width=13"])
    assert (config.name, config.width) == ("37", 13)
    with pytest.raises(ConfigError, match="'none'"):
        apply_overrides(config, ["width=none"])
    inherited = fdl.Config(_Windows, seq_len=7)
    apply_overrides(inherited, ["stride=3"])
    assert inherited.stride == 3


@pytest.mark.parametrize("setting", ["temperature=0.7", "k=5", "num_samples=2"])
def test_a_field_of_a_subclass_is_told_with_the_settings_that_give_it(setting):
    task = fdl.Config(LanguageModelTask, None, None)
    config = fdl.Config(Job, None, task, datasets={}, decode_datasets={}, run=None)
    name = setting.partition("=")[0]
    apply_overrides(config, [f"task.decoder.{setting}"])  # The default takes it at once.
    config.task.decoder = fdl.Config(Greedy, max_decode_steps=7)
    with pytest.raises(ConfigError, match=r"Sample has it: --set (.*)=VALUE") as error:
        apply_overrides(config, [f"task.decoder.{setting}"])
    told = re.search("Sample has it: --set (.*)=VALUE", str(error.value))[1].split()
    apply_overrides(config, [told[0], f"{told[1]}={setting.partition('=')[2]}"])
    assert f"{getattr(fdl.build(config.task.decoder), name)}" == setting.partition("=")[2]
