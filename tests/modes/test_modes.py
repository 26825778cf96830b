"""Modes of the command line: their options, their help, and modes of a user's own package."""

import re
import subprocess
import sys

import pytest

from praxis_lite.core.errors import ConfigError
from praxis_lite.main import MODES, PROGRAMS, main
from praxis_lite.modes.mode import CommandLine
from praxis_lite.modes.options import parse_command_line
from praxis_lite.trainer.job_on_mesh import partitioner_of
from tests.support.commands import praxis
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
            "plan and sweep; mypackage.modes.Count ",
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
    (["--mode=plan", "--measur", "--step=3"], "eval, decode"),
    (["--mode=plan", "--step"], "eval, decode"),
    (["--mode=eval", "--prompts=x"], "decode; eval "),
    (["--mode=check", "--steps=train"], "--steps: invalid int value: 'train'"),
    (["--chatt"], "--chat?"),
]
ANSWERED = [["--help"], ["--version"], ["list"], ["train", "--help"], ["checkpoints", "--help"]]
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


def test_help_and_errors_of_the_command_line_do_not_import_jax():
    code = ANSWERED_WITHOUT_JAX.format([*ANSWERED, *(argv for argv, _ in WRONG)])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "\nlm.PyDocs " in done.stdout
    answers = " ".join(line for line in done.stderr.splitlines() if not line.startswith("0 "))
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


def test_a_subcommand_is_the_same_as_the_options_of_pax():
    def same(words, options):
        assert parse_command_line(words.split(), MODES) == parse_command_line(
            options.split(), MODES
        )

    same("train lm.A --set a=1", "--exp=lm.A --set a=1")
    same("train --job_log_dir=/x lm.A", "--exp=lm.A --job_log_dir=/x")
    same("eval /x --step=7", "--mode=eval --step=7 --job_log_dir=/x")
    same("report /x --html=r.html /y", "--mode=report /x /y --html=r.html")
    same("export /x OUT --what=decode", "--mode=export --job_log_dir=/x --what=decode OUT")


@pytest.mark.parametrize(
    "argv, words",
    [
        (["trian"], "Did you mean train?"),
        (["-q", "decode", "/x"], "must come first: `praxis decode -q ...`"),
        (["checkpoint", "ls"], "Did you mean checkpoints"),
        (["lm.PyDocs"], "`praxis train lm.PyDocs`"),
        (["decode_once"], "in praxis_lite it is decode"),
        (["eval", "lm.PyDocs", "--job_log_dir=/x"], "both lm.PyDocs and --job_log_dir=/x"),
        (["eval", "--mode=decode"], "--mode=decode cannot be combined with `praxis eval`"),
        (["train", "lm.PyDocs", "lm.Synthetic"], "lm.Synthetic is not an option"),
        (["train", "lm.PyDocs", "--config=/gone"], "--config=/gone cannot be read"),
    ],
)
def test_a_wrong_subcommand_or_argument_is_named_with_its_fix(argv, words, capsys):
    assert praxis(*argv) == 2
    assert words in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("name", MODES)
def test_help_of_a_mode_has_its_options_alone(name, capsys):
    assert praxis(name, "--help") == 0
    text = capsys.readouterr().out
    assert "--coordinator" in text
    for option, mode in {"--chat": "decode", "--measure": "plan", "--shrink": "check"}.items():
        assert (option in text) == (mode == name)


def test_help_has_one_line_for_each_subcommand(capsys):
    texts = []
    for argv in ([], ["--help"]):
        assert praxis(*argv) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert re.findall(r"^  (\w+) ", texts[0], re.MULTILINE) == [*MODES, *PROGRAMS]


def test_a_job_is_checked_for_what_there_is():
    with pytest.raises(ConfigError, match="'lode'.*Did you mean load"):
        partitioner_of(None, "lode")
