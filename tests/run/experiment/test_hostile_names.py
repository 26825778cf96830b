"""`--exp` with names that mean harm: refused in a sentence, with nothing imported or looked at."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

from praxis_lite.main import main
from tests.support.job_runs import CHECKOUT

CYRILLIC_E, FULLWIDTH_E, BIDI = "\u0435", "\uff45", "\u202e"
NAMES = {
    "not listed": "trap.experiments.Trap",
    "not listed, at the top": "trap.Trap",
    "its submodule": "trap.deep.deeper.Trap",
    "a class of the library": "praxis_lite.main.main",
    "the library": "praxis_lite.run.trainer.trainer.train",
    "the tasks": "praxis_lite.tasks.loss.LossTask",
    "the system": "os.system",
    "the system, twice": "praxis_lite.experiments.os.system",
    "what a module imports": "praxis_lite.experiments.lm.fdl.Config",
    "builtins": "builtins.eval",
    "a process": "subprocess.Popen",
    "main": "__main__.sys",
    "an attribute": "praxis_lite.experiments.lm.__class__",
    "a method": "praxis_lite.experiments.lm.PyDocs.__init__",
    "its globals": "praxis_lite.experiments.lm.PyDocs.__init__.__globals__",
    "a dunder module": "praxis_lite.experiments.__init__.Trap",
    "a function of the package": "praxis_lite.experiments.lm.rotary_lm.Trap",
    "a relative one": ".trap.Trap",
    "dots at the end": "trap.Trap..",
    "the folder above": "..trap.Trap",
    "a path": "../trap/Trap",
    "a path from the root": "/etc/passwd",
    "a file": "trap.py",
    "a URL": "https://example.org/trap.py",
    "a NUL": "trap\0.Trap",
    "a newline": "trap\nTrap",
    "terminal escapes": "\x1b]0;owned\x07\x1b[31mtrap.Trap\x1b[2J",
    "right to left": f"praxis_lite.experiments.lm.{BIDI}scoDyP",
    "a shell's words": "$(touch canary);`touch canary`|touch canary&&lm.PyDocs",
    "a format": "{0.__class__}%s%n",
    "code": "__import__('trap')",
    "a lookalike": f"{CYRILLIC_E}xperiments.lm.PyDocs",
    "a wide letter": f"{FULLWIDTH_E}xperiments.lm.PyDocs",
    "a wide letter in the module": "lm\uff2d.PyDocs",
    "a lone surrogate": "trap.\udc80",
    "a megabyte": "a" * 2**20,
    "a megabyte of dots": "." * 2**20,
    "a megabyte of modules": "trap." * 2**18 + "Trap",
    "nothing": "",
    "a space": " lm.PyDocs",
    "a switch": "--help",
}

CHILD = """
import contextlib, io, json, os, sys

from praxis_lite import main
from praxis_lite.run.experiment import registry

asked, events = [], []

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        asked.append(name)

def hear(event, args):
    if event in ("compile", "open"):
        events.append([event, str(args[1 if event == "compile" else 0])])
    elif event in ("import", "exec", "os.system", "socket.connect", "subprocess.Popen"):
        events.append([event, str(args[0])])

def refuse(name):
    asked.clear(), events.clear()
    before, out, err, code = set(sys.modules), io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main.main([f"--exp={name}", "--mode=explain"])
        except SystemExit as stop:
            code = stop.code
    return {"code": code, "out": out.getvalue(), "err": err.getvalue(), "asked": list(asked),
            "events": list(events), "modules": sorted(set(sys.modules) - before)}

refuse("lm.Nothing")  # What the first refusal loads, such as difflib, is loaded now.
sys.meta_path.insert(0, Finder)
sys.addaudithook(hear)
names = json.loads(sys.stdin.read())
answers = {which: refuse(name) for which, name in names.items()}
json.dump(answers, sys.stdout)
"""


@pytest.fixture(scope="module")
def trap(tmp_path_factory):
    """A folder with a package that leaves a file when it is imported."""
    folder = tmp_path_factory.mktemp("trap")
    source = f"""
        from pathlib import Path
        Path({str(folder)!r}, "canary").touch()
        from praxis_lite import Experiment, register
        @register
        class Trap(Experiment):
            "Not to be found."
    """
    for module in ("__init__", "experiments", "deep/__init__", "deep/deeper"):
        file = folder / "trap" / f"{module}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(textwrap.dedent(source))
    return folder


@pytest.fixture(scope="module")
def answers(trap):
    env = {**os.environ, "PYTHONPATH": f"{CHECKOUT}:{trap}"}
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        cwd=trap, env=env, text=True, input=json.dumps(NAMES), capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("which", NAMES)
def test_it_is_refused_in_one_short_printable_paragraph(answers, which):
    answer = answers[which]
    assert (answer["code"], answer["out"]) == (2, "")
    assert answer["err"].startswith("error: ") and len(answer["err"]) < 700
    # Nothing that a terminal obeys, nothing of the lines of a traceback.
    assert all(item.isprintable() for item in answer["err"].replace("\n", ""))
    assert "Traceback" not in answer["err"] and "\n\n" not in answer["err"]


@pytest.mark.parametrize("which", NAMES)
def test_nothing_is_imported_run_or_read_but_the_source_of_experiments(answers, which):
    answer = answers[which]
    assert answer["modules"] == []
    assert set(answer["asked"]) <= {"praxis_lite.experiments"}
    read = {tuple(item) for item in answer["events"]}
    assert {event for event, _ in read} <= {"open", "compile"}
    experiments = f"{CHECKOUT}/praxis_lite/experiments/"
    own_start = "/proc/self/stat"  # When this process began, for the goodput of a training.
    assert all(file.startswith(experiments) or file == own_start for _, file in read)
    # Work, not time: each file of experiments is read and parsed a few times at most.
    num_files = len(list((CHECKOUT / "experiments").glob("*.py")))
    assert len(answer["events"]) <= 8 * num_files


def test_a_directory_that_a_terminal_obeys_is_escaped(capsys):
    with pytest.raises(SystemExit):
        main(["--mode=eval", "--job_log_dir=/nowhere/\x1b[2J\x07"])
    message = capsys.readouterr().err
    assert "/nowhere/\\x1b[2J\\x07 does not exist" in message and "\x1b" not in message


def test_no_trap_was_sprung(trap, answers):
    assert sorted(os.listdir(trap)) == ["trap"]


def test_the_trap_works_where_the_package_is_listed(trap):
    # Else the tests above would pass with any trap.
    command = [sys.executable, "-m", "praxis_lite.main", "--exp=trap.experiments.Trap"]
    done = subprocess.run(
        [*command, "--packages=trap", "--mode=explain"],
        cwd=trap, env={**os.environ, "PYTHONPATH": str(CHECKOUT)}, text=True, capture_output=True,
    )
    canary = trap / "canary"
    assert canary.exists() and " mesh(), task()" in done.stderr
    canary.unlink()


def test_the_list_has_what_is_listed_and_nothing_else(trap):
    command = [sys.executable, "-m", "praxis_lite.main", "--list"]
    env = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    for flags, num_traps in (([], 0), (["--packages=trap"], 4)):
        done = subprocess.run([*command, *flags], cwd=trap, env=env, text=True, capture_output=True)
        lines = done.stdout.splitlines()
        assert done.returncode == 0 and any(line.startswith("lm.PyDocs") for line in lines)
        assert len([line for line in lines if "Not to be found." in line]) == num_traps
    assert not (trap / "canary").exists()
