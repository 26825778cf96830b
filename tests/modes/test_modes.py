"""Modes of the command line: their options, their help, and modes of a user's own package."""

import subprocess
import sys

import pytest

from praxis_lite.core.errors import ConfigError
from praxis_lite.main import MODES, main
from praxis_lite.modes.mode import CommandLine
from praxis_lite.modes.options import parse_command_line
from praxis_lite.trainer.job_on_mesh import partitioner_of
from tests.support.job_runs import CHECKOUT
from tests.support.log_lines import terminal_text

WITHOUT_JAX = """
import sys

assert "jax" not in sys.modules
"""
MODES_PY = """
from praxis_lite.modes import Mode
from tests.support.log_lines import terminal_text


class Count(Mode):
    summary = "counts devices"

    def add_options(self, options):
        options.add_argument("--times", metavar="N", type=int, default=7)

    def run(self, command, *, times):
        from praxis_lite.modes.job_from_command import experiment_of, job_on_mesh

        launched = experiment_of(command)
        with job_on_mesh(command, launched, "load") as job:
            print(f"{times} times {job.partitioner.mesh.size} devices")
        return 5


class Wrong(Mode):
    summary = "fails"

    def run(self, command):
        raise LookupError("no such number")


NotOne = int
"""
RAISING_LINE = 1 + MODES_PY.partition("raise")[0].count("\n")


@pytest.fixture
def mypackage(tmp_path, monkeypatch):
    (tmp_path / "mypackage").mkdir()
    (tmp_path / "mypackage/__init__.py").touch()
    (tmp_path / "mypackage/modes.py").write_text(MODES_PY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "mypackage"
    for name in ("mypackage", "mypackage.modes"):
        sys.modules.pop(name, None)


@pytest.mark.slow
def test_a_mode_of_a_users_package_has_its_options_and_its_exit_status(mypackage):
    (mypackage / "modes.py").write_text(WITHOUT_JAX + MODES_PY)
    done = subprocess.run(
        [
            sys.executable,
            CHECKOUT / "main.py",
            "--packages=mypackage",
            "--mode=mypackage.modes.Count",
            "--times=3",
            "--exp=lm.Synthetic",
        ],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (5, "")
    out = terminal_text(done.stdout)
    assert out.startswith("praxis_lite.experiments.lm.Synthetic, mypackage.modes.Count\n")
    assert done.stdout.splitlines()[-1] == "3 times 8 devices"


@pytest.mark.parametrize(
    "argv, status, words",
    [
        (["--mode=mypackage.modes.Count"], 2, "add --packages=mypackage."),
        (["--packages=mypackage", "--mode=mypackage.modes.Cuont"], 2, "Did you mean Count?"),
        (["--packages=mypackage", "--mode=mypackage.modes.NotOne"], 2, "<class 'int'>;"),
        (
            ["--packages=mypackage", "--mode=mypackage.modes.Count", "--topology=cpu:8"],
            2,
            "--mode=plan and --mode=sweep; --mode=mypackage.modes.Count ",
        ),
        (
            ["--packages=mypackage", "--mode=mypackage.modes.Wrong"],
            1,
            f'line {RAISING_LINE}, in run: `raise LookupError("no such number")`',
        ),
        (["--packages=nowhere", "--mode=nowhere.modes.Count"], 2, "--packages=nowhere"),
    ],
)
def test_a_mode_that_cannot_run_is_named_in_a_paragraph(argv, status, words, mypackage, capsys):
    with pytest.raises(SystemExit) as ended:
        main(argv)
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (status, "")
    assert words in " ".join(err.split()) and "Traceback" not in err


WRONG = [
    (["--mode=trian"], "train?"),
    (["--mode=plan", "--measur", "--step=3"], "--mode=eval, --mode=decode"),
    (["--mode=plan", "--step"], "--mode=eval, --mode=decode"),
    (["--mode=eval", "--prompts=x"], "--mode=decode; --mode=eval "),
    (["--mode=check", "--steps=train"], "--steps: invalid int value: 'train'"),
    (["--chatt"], "--chat?"),
]
ANSWERED_WITHOUT_JAX = """
import sys
from praxis_lite.main import main
for argv in {}:
    try:
        main(argv)
    except SystemExit as ended:
        print(ended.code, "after", *argv, file=sys.stderr)
    assert "jax" not in sys.modules
"""


def test_a_wrong_mode_or_option_is_answered_before_jax_is_imported():
    code = ANSWERED_WITHOUT_JAX.format([argv for argv, _ in WRONG])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answers = " ".join(done.stderr.split())
    for argv, words in WRONG:
        answer, _, answers = answers.partition(f" 2 after {' '.join(argv)}")
        assert words in answer, argv
    assert answers == ""


def test_options_reach_their_mode_and_no_other():
    argv = ["--mode=decode", "--exp=a", "--prompt", "x", "y", "--set", "b=1", "--prompt=z"]
    command, mode, options = parse_command_line(argv, MODES)
    assert command == CommandLine(mode="decode", exp="a", packages=[], settings=["b=1"])
    assert mode is MODES["decode"]
    assert options == {
        "step": None,
        "follow": False,
        "follow_seconds": 600,
        "prompt": ["x", "y", "z"],
        "prompts": None,
        "chat": False,
    }
    none = dict.fromkeys(("metrics_port", "metrics_host", "health_dir", "grace_seconds"))
    expected = CommandLine(packages=[], settings=[]), MODES["train"], none
    assert parse_command_line([], MODES) == expected
    assert parse_command_line(["--mode=check"], MODES)[2]["steps"] == 20
    options = parse_command_line(["--mode=plan", "--steps=eval,train"], MODES)[2]
    assert options["steps"] == ["eval", "train"]


@pytest.mark.parametrize("name", MODES)
def test_help_of_a_mode_has_its_options_alone_and_help_of_all_has_all(name, capsys):
    texts = {}
    for argv in ([f"--mode={name}", "--help"], ["--help"]):
        with pytest.raises(SystemExit) as ended:
            parse_command_line(argv, MODES)
        assert ended.value.code == 0
        texts[len(argv)] = capsys.readouterr().out
    assert "--coordinator" in texts[2] and MODES[name].summary in " ".join(texts[1].split())
    for other in ("--chat", "--measure", "--shrink"):
        local = {"--chat": "decode", "--measure": "plan", "--shrink": "check"}[other]
        assert (other in texts[2]) == (local == name)
        assert other in texts[1]


def test_a_job_is_checked_for_what_there_is():
    with pytest.raises(ConfigError, match="'lode'.*Did you mean load"):
        partitioner_of(None, "lode")
