"""`praxis completion bash`: bash completes subcommands, options, experiments and settings."""

import os
import subprocess
import sys

import pytest

from tests.support.commands import praxis
from tests.support.job_runs import CHECKOUT

COMPLETE = """
praxis() {{ {python} -m praxis_lite "$@"; }}
eval "$(praxis completion bash)"
for typed in {lines}; do
  COMP_LINE=$typed COMP_WORDS=($typed) COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
  _shtab_praxis praxis
  echo "$typed -> ${{COMPREPLY[@]}}"
done
"""


@pytest.mark.slow
def test_bash_completes_subcommands_experiments_options_and_settings(tmp_path):
    pytest.importorskip("shtab")
    (tmp_path / "job").mkdir()
    (tmp_path / "job/config.txt").write_text("run.seed=0\nrun.num_train_steps=7\nmesh=x\n")
    lines = {
        "praxis ev": "eval",
        "praxis train lm.Sy": "lm.Synthetic",
        "praxis decode --prompts": "--prompts",
        "praxis eval job --set run.s": "run.seed",
        "praxis train lm.Synthetic --set run.see": "run.seed",
        "praxis checkpoints ver": "verify",
        "praxis checkpoints verify jo": "job",
    }
    script = COMPLETE.format(python=sys.executable, lines=" ".join(map(repr, lines)))
    path = os.pathsep.join([str(CHECKOUT), *sys.path])
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path, "XDG_CACHE_HOME": str(tmp_path / "cache")},
    )
    assert done.stdout.splitlines() == [f"{line} -> {words}" for line, words in lines.items()]
    assert (tmp_path / "cache/praxis_lite/completion/lm.Synthetic").stat().st_size > 1000


def test_options_are_completed_by_files_directories_or_settings(capsys):
    pytest.importorskip("shtab")
    assert praxis("completion", "bash") == 0
    script = capsys.readouterr().out
    for option, function in {
        "_eval___set": "_praxis_settings",
        "_eval___config": "_shtab_compgen_files",
        "_report___html": "_shtab_compgen_files",
        "_checkpoints_verify_pos_0": "_shtab_compgen_dirs",
    }.items():
        assert f"_shtab_praxis{option}_COMPGEN={function}\n" in script, option
    assert "_shtab_praxis_eval___step_COMPGEN" not in script


def test_without_shtab_the_error_names_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert praxis("completion", "zsh") == 2
    assert "praxis_lite[completion]" in capsys.readouterr().err
