"""`--config FILE`: the settings of a file, in both forms, and errors that name the line."""

import pytest

from praxis_lite.config.experiment_overrides import configured
from praxis_lite.config.settings_file import settings_in_file
from praxis_lite.core.errors import ConfigError
from praxis_lite.experiments.lm import PyDocs
from praxis_lite.main import MODES
from praxis_lite.modes.options import parse_command_line

YAML = """\
# A comment.
run:
  num_train_steps: 200
  checkpoints.every_steps: 50
  stopping:
    early: null
mesh.ici_mesh_shape: [1, 3, 2]
task:
  learner: {optimizer: lion, learning_rate: 3e-4}
  inputs_split_mapping.map_2d: [[replica, data], ~]
  decoder.eos_id: []
  name: "7"
corpus.files: ~/texts/*.txt
run.debug_nans: yes
"""
SETTINGS = [
    "run.num_train_steps=200",
    "run.checkpoints.every_steps=50",
    "run.stopping.early=None",
    "mesh.ici_mesh_shape=(1, 3, 2)",
    "task.learner.optimizer=lion",
    "task.learner.learning_rate=0.0003",
    "task.inputs_split_mapping.map_2d=(('replica', 'data'), None)",
    "task.decoder.eos_id=()",
    "task.name='7'",
    "corpus.files=~/texts/*.txt",
    "run.debug_nans=True",
]


def test_yaml_becomes_the_settings_that_one_would_write_after_set(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text(YAML)
    settings = settings_in_file(file)
    assert settings == SETTINGS
    assert [s.location.rpartition(" ")[2] for s in settings[:7]] == list("3467999")[:6] + ["10"]


@pytest.mark.parametrize(("name", "text"), [("a.yaml", "run.seed: 7"), ("a.txt", "run.seed=7")])
def test_a_byte_order_mark_is_not_part_of_a_setting(tmp_path, name, text):
    (tmp_path / name).write_bytes(f"\ufeff{text}\r\n".encode())
    assert settings_in_file(tmp_path / name) == ["run.seed=7"]


def test_set_overrides_the_files_and_later_files_earlier_ones(tmp_path):
    for name in "ab":
        (tmp_path / name).write_text(f"# {name}\n\nx.{name}='two words'\n")
    argv = ["train", "lm.A", "--set", "x=7", f"--config={tmp_path}/a", f"--config={tmp_path}/b"]
    command, _, _ = parse_command_line([*argv, "--set", "y=9"], MODES)
    assert command.settings == ["x.a=two words", "x.b=two words", "x=7", "y=9"]


@pytest.mark.parametrize(
    "name, text, words",
    [
        ("a.txt", "run.seed=7\nrun.sede=8\n", r"a\.txt, line 2: --set run\.sede.*run\.seed"),
        (
            "a.txt",
            "run.seed=7\nrun.seed=two words\n",
            r"a\.txt, line 2: run\.seed=two words; .*Quote",
        ),
        ("a.txt", "run.seed='7\n", r"a\.txt, line 1: .*No closing quotation"),
        ("a.yaml", "run:\n  seed: 7\n  sede: 8\n", r"a\.yaml, line 3: --set run\.sede"),
        ("a.yaml", "run:\n  seed: many\n", r"a\.yaml, line 2: .*'many'.* int"),
        ("a.yaml", "run: [\n", r"a\.yaml, line 2: "),
        ("a.yml", "- run\n", r"a\.yml, line 1: expected a mapping"),
        ("a.YAML", "run:\n  seed: 7\n  sede: 8\n", r"a\.YAML, line 3: --set run\.sede"),
        ("a.yaml", "x.y: 1\nrun:\n  seed: 7\n  seed: 8\n", r"line 4: the key 'seed' .* line 3"),
        ("a.yaml", "x: [{a: 1, a: 2}]\n", r"line 1: the key 'a' is also on line 1"),
        ("config.json", "{}", r"config\.json is JSON; .*config\.txt"),
        ("config.JSON", "{}", r"config\.JSON is JSON; .*config\.txt"),
        ("gone.yaml", None, r"gone\.yaml cannot be read: No such file"),
    ],
)
def test_an_error_in_a_file_names_the_line(name, text, words, tmp_path):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=words):
        configured(PyDocs, settings_in_file(tmp_path / name))
