"""A user's own package elsewhere, with the library installed from a wheel."""

import functools
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys

import fiddle as fdl
import pytest

from praxis_lite import ConfigError
from praxis_lite.config.config_json import config_lines
from praxis_lite.config.experiment_overrides import configured
from praxis_lite.core import Partitioner, make_mesh
from praxis_lite.core.callables import callable_name
from praxis_lite.experiment import registry
from praxis_lite.trainer.decoding.user_prompts import prompt_batch
from praxis_lite.trainer.metrics.json_lines import read_json_lines
from tests.support.job_runs import CHECKOUT


def block_of(page, name):
    text = (CHECKOUT / page).read_text(encoding="utf-8")
    block = re.search(rf"begin {name} -->\n```python\n(.*?)```\n<!-- end {name}", text, re.DOTALL)
    assert block, f"{page} has no block {name}"
    return block.group(1)


def test_the_documented_experiment_decodes(registry_copy):
    names = {"__name__": "page"}
    exec(compile(block_of("docs/experiments.md", "MyLm"), "experiments.md", "exec"), names)
    job = fdl.build(configured(names["MyLm"], ["task.decoder.temperature=0.7"]))
    prompts = prompt_batch(job.task, "The class ").element_spec()
    traced = Partitioner(job.task, make_mesh(job.mesh)).decode_step.trace(prompts)
    assert traced.out_info["output_ids"].shape == (1, 1, job.task.decoder.max_decode_steps)


def test_the_documented_settings_apply_to_it(registry_copy):
    names = {"__name__": "page"}
    exec(compile(block_of("docs/experiments.md", "MyLm"), "experiments.md", "exec"), names)
    text = (CHECKOUT / "docs/commands.md").read_text(encoding="utf-8").replace("\\\n", "")
    whole = text[text.index("If a field is a function") : text.index("## Prompts")]
    lines = re.findall(r"^    --set .*", whole, flags=re.M)
    assert len(lines) == 4
    for line in lines:
        settings = shlex.split(line)[1:]
        changed = config_lines(configured(names["MyLm"], settings))
        assert changed != config_lines(names["MyLm"]().config()), line


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder in which the wheel of this checkout's sdist is installed, and nothing else."""
    pytest.importorskip("setuptools", reason="builds the wheel; tensorboard brings it")
    folder = tmp_path_factory.mktemp("wheel")
    # A copy, for a build leaves its traces in the tree.
    source = folder / "source"
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(CHECKOUT / name, source)
    for name in ("praxis_lite", "praxis_tools", "tasks", "experiments"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(CHECKOUT / name, source / name, ignore=ignored)
    # What the package needs is in the environment already: nothing is fetched.
    pip = "-m pip --disable-pip-version-check -q {} --no-deps --no-index"
    for command, files in (
        (f"setup.py -q sdist --dist-dir {folder}", ""),
        (f"{pip} --no-build-isolation --wheel-dir {folder}".format("wheel"), "*.tar.gz"),
        (f"{pip} --no-compile --target {folder}/site".format("install"), "*.whl"),
    ):
        given = folder.glob(files) if files else ()
        done = subprocess.run(
            [sys.executable, *command.split(), *given], cwd=source, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    return folder / "site"


@pytest.mark.slow
def test_the_wheel_holds_the_library_with_its_tasks_and_experiments_only(site):
    tops = {name for name in os.listdir(site) if not name.endswith(".dist-info")}
    assert tops == {"bin", "praxis_lite", "praxis_tools"}

    def files(folder):
        kinds = (".py", ".pyi", ".toml", ".html", ".typed")
        paths = folder.rglob("*")
        return {str(path.relative_to(folder)) for path in paths if path.name.endswith(kinds)}

    expected = files(CHECKOUT / "praxis_lite")
    for name in ("tasks", "experiments"):
        expected |= {f"{name}/{path}" for path in files(CHECKOUT / name)}
    assert files(site / "praxis_lite") == expected
    assert files(site / "praxis_tools") == files(CHECKOUT / "praxis_tools")


OWN = """
from praxis_lite import Experiment, register
from praxis_lite.tasks import language_model
from tasks import words
print(words.__file__, language_model.__file__)
@register
class {}(Experiment):
    "One of the user's."
"""


@pytest.fixture
def own(tmp_path):
    """A folder with packages `tasks` and `experiments` of a user's own."""
    for name, text in {
        "tasks/words": "",
        "experiments/mine": OWN.format("Mine"),
        "experiments/lm": OWN.format("PyDocs"),
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).with_name("__init__.py").touch()
        (tmp_path / f"{name}.py").write_text(text)
    yield tmp_path
    for name in [one for one in sys.modules if one.partition(".")[0] in ("experiments", "tasks")]:
        del sys.modules[name]


@pytest.mark.parametrize("is_by_path", [False, True])
@pytest.mark.slow
def test_a_users_own_tasks_and_experiments_stand_beside_the_librarys(own, is_by_path):
    command = [CHECKOUT / "main.py"]
    folder, env = own, {**os.environ, "PYTHONPATH": ""}
    if is_by_path:  # The checkout comes before the user's folder, twice.
        command, folder = ["-m", "praxis_lite"], CHECKOUT
        env["PYTHONPATH"] = f"{CHECKOUT}:{own}"
    done = subprocess.run(
        [
            sys.executable,
            *command,
            "--exp=mine.Mine",
            "--packages=experiments,tasks",
            "--mode=explain",
        ],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
    )
    # It was imported; then it is found to say nothing.
    assert done.stdout == f"{own}/tasks/words.py {CHECKOUT}/tasks/language_model.py\n"
    assert (done.returncode, "experiments.mine.Mine " in done.stderr) == (2, True)


def test_a_short_name_in_both_is_refused_and_a_full_one_means_itself(
    registry_copy, own, monkeypatch
):
    monkeypatch.syspath_prepend(own)
    # Without the user's packages it is what it always was.
    for name in ("lm.PyDocs", "experiments.lm.PyDocs"):
        assert registry.get_experiment(name).__module__ == "praxis_lite.experiments.lm"
    find = functools.partial(registry.get_experiment, packages=["experiments"])
    names = ["experiments.lm.PyDocs", "praxis_lite.experiments.lm.PyDocs"]
    with pytest.raises(ConfigError, match=f" {' or '.join(names)}. Use"):
        find("lm.PyDocs")
    for name in names:
        assert callable_name(find(name)) == name
    assert callable_name(find("mine.Mine")) == "experiments.mine.Mine"


@pytest.mark.parametrize("name", ["tasks", "experiments"])
def test_tasks_and_experiments_are_packages_of_the_library_by_that_name_alone(name):
    assert importlib.import_module(f"praxis_lite.{name}").__file__.startswith(str(CHECKOUT))
    # A second copy of a class is another class: isinstance returns False, and it registers twice.
    with pytest.raises(ImportError, match=f"praxis_lite.{name}"):
        importlib.import_module(name)


@pytest.mark.slow
def test_a_users_package_runs_from_an_empty_folder_with_the_installed_library(site, tmp_path):
    (tmp_path / "mypackage").mkdir()
    (tmp_path / "mypackage/__init__.py").touch()
    (tmp_path / "mypackage/experiments.py").write_text(
        block_of("docs/experiments.md", "MyLm")
        # Whose library it was.
        + "\nimport praxis_lite.tasks\nprint(praxis_lite.__file__, praxis_lite.tasks.__file__)\n"
    )
    argv = ["--packages=mypackage", "--exp=mypackage.experiments.MyLm"]
    argv += ["--job_log_dir=jobs/my_lm", "--set"]
    # The page trains for five times as many steps, with more layers and larger batches.
    argv += [
        "run.num_train_steps=40",
        "run.evaluation.max_batches=1",
        "BATCH_SIZE=12",
        "task.model.num_layers=1",
    ]
    env = {**os.environ, "PYTHONPATH": str(site), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-m", "praxis_lite", *argv],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{site}/praxis_lite/__init__.py {site}/praxis_lite/tasks/__init__.py" in done.stdout
    assert str(CHECKOUT) + os.sep not in done.stdout
    steps = read_json_lines(tmp_path / "jobs/my_lm/metrics.jsonl")
    assert [line["step"] for line in steps] == list(range(1, 41))
    assert steps[-1]["tokens_per_second"] * steps[-1]["step_time"] == pytest.approx(12 * 128)
    # A model that has only learned how often each byte comes stays near 3.2.
    assert steps[-1]["loss"] < 2.9
    assert "trained to step 40" in done.stdout and "heldout: " in done.stdout
    # The page's next steps: a prompt, also with a temperature.
    argv = ["--packages=mypackage", "--job_log_dir=jobs/my_lm", "--prompt", "The class ", "--set"]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "praxis_lite",
            "--mode=decode",
            *argv,
            "task.decoder.temperature=0.7",
            "mesh.ici_mesh_shape=1,1,1",
            "task.decoder.max_decode_steps=8",
        ],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "decoded 1 record of command_line with the weights of step 40" in done.stdout
    # The library's own experiments are there as well.
    listed = subprocess.run(
        [sys.executable, "-m", "praxis_lite", "list", "--packages=mypackage"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert "lm.PyDocs" in listed.stdout and "mypackage.experiments.MyLm" in listed.stdout
