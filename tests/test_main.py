"""The command line: what runs, and one paragraph with exit status 2 for what the user can mend."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from praxis_lite.config.config_json import config_lines, dump_config
from praxis_lite.config.overrides import apply_overrides
from praxis_lite.core.callables import callable_name
from praxis_lite.experiment import registry
from praxis_lite.job.job_dir import open_for_training
from tests.support.job_runs import CHECKOUT, home, launch

TINY = "--exp=jobzoo.experiments.Tiny"


@pytest.fixture(autouse=True)
def packages():
    home()


def refused(*argv, num_devices=8):
    """Returns the error of a `main` that refuses: a paragraph, before anything is compiled."""
    done = launch(*argv, num_devices=num_devices)
    assert done.code == 2, done
    assert done.num_compiled == 0, "something was compiled before the error"
    assert done.err.startswith("error:") and "Traceback" not in done.err
    assert "\n\n" not in done.err.rstrip("\n"), "more than one paragraph"
    assert max(map(len, done.err.splitlines())) <= 100
    assert "compiling" not in done.out and "initializing" not in done.out
    return " ".join(done.err.split())


SOFTMAX = "params/softmax/logits_ffn/linear/w"
SPLIT = "task.model.softmax_tpl.weight_split_dims_mapping"
ACTIVATION = "task.model.softmax_tpl.activation_split_dims_mapping"

# The setting, words that name the culprit, words that name the fix.
BAD_SETTINGS = {
    "a mesh larger than the devices": (
        "mesh.ici_mesh_shape=1,3,3",
        ["'data': 3, 'mdl': 3", " 9 ", " 8 (cpu"],
        ["mesh.ici_mesh_shape", "JAX_NUM_CPU_DEVICES"],
    ),
    "a mesh larger than is simulated": (
        "mesh.ici_mesh_shape=1,257,1",
        ["'data': 257", " 256 "],
        ["mesh.ici_mesh_shape"],
    ),
    "a mesh shape without all axes": (
        "mesh.ici_mesh_shape=4,2",
        ["mesh.ici_mesh_shape", "(4, 2)", "('replica', 'data', 'mdl')"],
        ["mesh.axis_names"],
    ),
    "an unknown axis of a weight": (
        f"{SPLIT}=data,modl",
        [SOFTMAX, "('data', 'modl')", "'modl'", "('replica', 'data', 'mdl')"],
        ["mdl?", "mesh.axis_names"],
    ),
    "an unknown axis of the mesh": (
        "mesh.axis_names=replica,data,model",
        [SOFTMAX, "'mdl'", "('replica', 'data', 'model')"],
        ["model?", "mesh.axis_names"],
    ),
    "an unknown axis of an activation": (
        f"{ACTIVATION}=data,None,modl",
        ["(13, 11, 257)", "('data', None, 'modl')"],
        ["mdl?", "mesh.axis_names"],
    ),
    "an unknown axis of the inputs": (
        "task.inputs_split_mapping={'map_2d': ('date', None)}",
        ["inputs_split_mapping['map_2d']", "'date'"],
        ["data?"],
    ),
    "an axis used twice by a weight": (
        f"{SPLIT}=mdl,mdl",
        [SOFTMAX, "('mdl', 'mdl')"],
        ["('replica', 'data', 'mdl')"],
    ),
    "an axis used twice by an activation": (
        f"{ACTIVATION}=data,None,data",
        ["activation_split_dims_mapping", "('data', None, 'data')"],
        ["('replica', 'data', 'mdl')"],
    ),
    "a mapping longer than a weight's rank": (
        f"{SPLIT}=data,mdl,None",
        ["softmax: ", "weight_split_dims_mapping", "('data', 'mdl', None)", " 3 ", "rank is 2"],
        ["one entry per dim"],
    ),
    "a mapping longer than an activation's rank": (
        f"{ACTIVATION}=data,None,mdl,None",
        ["activation_split_dims_mapping", "('data', None, 'mdl', None)", " 4 ", " 3 "],
        [" 1 "],
    ),
    "a missing rank of inputs_split_mapping": (
        "task.inputs_split_mapping={'map_1d': None}",
        ["inputs_split_mapping", "ids", "(13, 11)", "['map_1d']"],
        ["'map_2d'"],
    ),
    "a missing text file": (
        "datasets.train.corpus.files=/nowhere/*.txt",
        ["'/nowhere/*.txt'"],
        ["files"],
    ),
    "a wrong path of --set": (
        "run.num_train_step=7",
        ["run.num_train_step:"],
        ["run.num_train_steps"],
    ),
    "a wrong type of --set": (
        "run.num_train_steps=many",
        ["run.num_train_steps:", "'many'"],
        [" int", " 7"],
    ),
    "a number out of range": ("run.num_train_steps=0", ["run.num_train_steps", " 0;"], [" 1 "]),
    "a layer's size out of range": ("task.model.num_heads=0", ["num_heads", " 0;"], ["positive"]),
    "a learning rate that is no number": (
        "task.learner.learning_rate=nan",
        ["Learner.learning_rate", "nan"],
        ["1e+06"],
    ),
    "integers for activations": (
        "task.model.fprop_dtype=int8",
        ["TransformerLm.fprop_dtype", "'int8'"],
        ["bfloat16"],
    ),
    "a state larger than the machine": (
        "task.model.hidden_dims=10000000000",
        [
            " 8 ",
            "/ffn_layer1/linear/w [2, 7, 10000000000] float32",
        ],
        ["mesh.ici_mesh_shape", "fsdp", "bfloat16"],
    ),
    "a vocabulary smaller than the data's": (
        "task.model.vocab_size=100",
        ["datasets.train, batch 0", " ids ", " 99"],
        ["vocab_size", "is 100", "tokenizer"],
    ),
}


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_a_bad_setting_is_named_with_its_fix_before_anything_compiles(case, tmp_path):
    setting, culprits, fixes = BAD_SETTINGS[case]
    message = refused(TINY, f"--job_log_dir={tmp_path}", "--set", setting)
    for words in [*culprits, *fixes]:
        assert words in message
    # The next launch, mended, may take the directory.
    assert os.listdir(tmp_path) == []


# An experiment that cannot run, the culprit, the fix.
BAD_EXPERIMENTS = {
    "Ragged": (["ids (7, 11), labels (5, 11)"], ["first dim"]),
    "RaggedArrays": (["'ids': (7, 11), 'labels': (5, 11)"], ["first dim"]),
    "NoLabels": (["LanguageModelTask", "'labels'", "datasets.train"], ["'targets'"]),
    "NoTrain": (["['heldout']", "'train'"], ["datasets()"]),
}


@pytest.mark.parametrize("name", BAD_EXPERIMENTS)
def test_bad_batches_are_named_with_their_fix_before_anything_compiles(name, tmp_path):
    culprits, fixes = BAD_EXPERIMENTS[name]
    message = refused(f"--exp=jobzoo.experiments.{name}", f"--job_log_dir={tmp_path}")
    for words in [*culprits, *fixes]:
        assert words in message


def test_a_batch_of_prompts_without_a_key_is_named(tmp_path, monkeypatch):
    from praxis_lite.tasks.language_model import LanguageModelTask

    monkeypatch.setattr(LanguageModelTask, "required_decode_inputs", ("ids", "prefix_length"))
    message = refused(TINY, "--mode=explain")
    assert "'prefix_length'" in message and "decode_datasets.prompts" in message
    assert "prefix_lengths?" in message


def test_an_empty_text_file_is_named(tmp_path):
    empty = tmp_path / "empty.txt"
    empty.touch()
    message = refused(
        TINY, f"--job_log_dir={tmp_path / 'job'}", "--set", f"datasets.train.corpus.files={empty}"
    )
    assert f"'{empty}' " in message and "files" in message


class Gpu:
    """As much of a jax.Device as make_mesh looks at before it builds anything."""

    platform, process_index = "gpu", 0


def test_a_mesh_smaller_than_the_accelerators_is_refused_unless_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [Gpu()] * 8)
    argv = (TINY, f"--job_log_dir={tmp_path}", "--set", "mesh.ici_mesh_shape=1,2,2")
    message = refused(*argv)
    assert "'data': 2, 'mdl': 2} " in message and " 4 of 8 gpu " in message
    assert "mesh.ici_mesh_shape" in message and "mesh.allow_unused_devices=true" in message
    # The words given are a setting that is taken: the next obstacle is that these are no devices.
    monkeypatch.setattr(
        "praxis_lite.core.sharding.devices.device_order.mesh_utils.create_device_mesh",
        lambda *_, **__: sys.exit(77),
    )
    assert launch(*argv, "mesh.allow_unused_devices=true").code == 77


def test_what_is_missing_on_the_command_line_is_named(tmp_path):
    for mode in ("train", "explain"):
        message = refused(f"--mode={mode}", f"--job_log_dir={tmp_path}")
        assert f"`praxis {mode} EXP`" in message and "`praxis list`" in message
    assert "`praxis train` requires --job_log_dir=DIR" in refused(TINY)
    for mode in ("eval", "decode", "summary"):
        assert f"`praxis {mode}` requires --job_log_dir=DIR" in refused(mode)


def test_a_foreign_directory_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").touch()
    message = refused(TINY, f"--job_log_dir={tmp_path}")
    assert f"job_log_dir={tmp_path} " in message
    assert "thesis.tex" in message and "config.json" in message
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    # Root may write everywhere, but not below a file. (test_job_dir tries a user's rights.)
    (tmp_path / "file").touch()
    message = refused(TINY, f"--job_log_dir={tmp_path}/file/job")
    assert f"job_log_dir={tmp_path}/file/job " in message and "(Not a directory)" in message


def begun_job(folder: Path):
    """Returns the directory of a job of Tiny that has no checkpoint yet."""
    experiment = registry.get_experiment("jobzoo.experiments.Tiny", ["jobzoo"])
    config, name = experiment().config(), callable_name(experiment)
    job = open_for_training(folder, name)
    job.write_config(dump_config(config, name), config_lines(config))
    return job


@pytest.mark.parametrize("mode", ["decode", pytest.param("eval", marks=pytest.mark.slow)])
def test_a_job_without_a_checkpoint_is_named(mode, tmp_path):
    begun_job(tmp_path)
    message = refused(f"--mode={mode}", f"--job_log_dir={tmp_path}")
    assert f" {tmp_path}/checkpoints" in message and "praxis train" in message
    message = refused(f"--mode={mode}", f"--job_log_dir={tmp_path / 'typo'}")
    assert f"job_log_dir={tmp_path}/typo " in message and "Train the job first" in message


def test_reading_a_job_makes_nothing_in_its_directory(tmp_path):
    begun_job(tmp_path)
    before = sorted(os.listdir(tmp_path))
    refused("--mode=decode", f"--job_log_dir={tmp_path}")
    assert sorted(os.listdir(tmp_path)) == before


def test_the_job_of_another_experiment_is_refused(tmp_path):
    begun_job(tmp_path)
    for argv in ((), ("--mode=decode",)):
        message = refused("--exp=jobzoo.experiments.Wasteful", f"--job_log_dir={tmp_path}", *argv)
        assert "jobzoo.experiments.Tiny" in message and "jobzoo.experiments.Wasteful" in message


def test_list_shows_names_and_summaries():
    done = launch("list")
    assert done.code == 0 and done.num_compiled == 0
    lines = dict(line.split(maxsplit=1) for line in done.out.splitlines())
    assert "language reference" in lines["lm.PyDocs"]
    assert "lm.Synthetic" in lines


def test_two_jobs_of_one_process_do_not_share_settings():
    from jobzoo.experiments import Tiny

    config = Tiny().config()
    apply_overrides(config, ["datasets.train.corpus.files=/elsewhere.txt"])
    # Shared within a job, as the experiment says ...
    assert config.decode_datasets["prompts"].corpus.files == "/elsewhere.txt"
    assert config.datasets["train"].corpus is config.datasets["heldout"].corpus
    # ... and with no other.
    assert Tiny().config().datasets["train"].corpus.files.endswith("texts/*.txt")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lm.PyDoc", " lm.PyDocs, "),
        ("mypackage.experiments.MyLn", "mypackage.experiments.MyLm?"),
        ("Same", "twins.one.Same or twins.two.Same"),
    ],
)
def test_an_unknown_or_ambiguous_name_suggests_and_exits_2(name, words, packages_made, tmp_path):
    package = "twins" if name == "Same" else "mypackage"
    message = refused(f"--exp={name}", f"--packages={package}", f"--job_log_dir={tmp_path}")
    assert words in message


@pytest.fixture
def packages_made(tmp_path, monkeypatch, registry_copy):
    """Packages with experiments: MyLm of one, and two of one name."""
    source = "from praxis_lite import Experiment, register\n@register\nclass {}(Experiment): 0\n"
    for path, name in {
        "mypackage/experiments": "MyLm",
        "twins/one": "Same",
        "twins/two": "Same",
    }.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / f"{path}.py").write_text(source.format(name))
        (tmp_path / path).parent.joinpath("__init__.py").touch()
    for name in [x for x in registry_copy if not x.startswith("praxis_lite.")]:
        del registry_copy[name]
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [x for x in sys.modules if x.partition(".")[0] in ("mypackage", "twins")]:
        del sys.modules[name]


@pytest.mark.slow
def test_a_package_in_the_current_directory_is_found_and_hides_no_installed_one(tmp_path):
    (tmp_path / "mypackage").mkdir()
    (tmp_path / "mypackage/__init__.py").touch()
    (tmp_path / "mypackage/experiments.py").write_text(
        "import fiddle\nMyLm = None\nraise SystemExit('mine was imported')\n"
    )
    (tmp_path / "fiddle.py").write_text("raise SystemExit('the stray file was imported')")
    command = [sys.executable, CHECKOUT / "main.py", "--packages=mypackage"]
    command += ["--exp=mypackage.experiments.MyLm"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr == "mine was imported\n"
