"""The recipes of clusters/, and programs that stand for a cluster's while their scripts run."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from praxis_lite.main import MODES
from praxis_lite.modes.mode import CommandLine
from praxis_lite.modes.options import parse_command_line

ROOT = Path(__file__).parents[2]
CLUSTERS = ROOT / "clusters"


def our_options(argv: Sequence[str]) -> tuple[CommandLine, dict[str, Any]]:
    """Returns the options of a command line that trains, as the program itself reads it."""
    command, mode, options = parse_command_line(argv, MODES)
    assert mode is MODES["train"]
    return command, options


def check_shell(path: Path) -> None:
    """Checks a script with bash, and with ShellCheck where that is installed."""
    subprocess.run(["bash", "-n", path], check=True)
    program = tool("shellcheck")
    done = subprocess.run([program, "--shell=bash", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def tool(name: str) -> str:
    """Returns the path of a program of a package of the extra `test`, or skips the test."""
    path = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def program(folder: Path, name: str, script: str) -> None:
    """Makes a program of a shell script, which writes its arguments to the file `NAME.calls`."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(
        # A single write: calls at the same time do not mix.
        f'#!/bin/bash\nprintf "%s\\0" "$@" END >> "{folder}/{name}.calls"\n{script}\n'
    )
    path.chmod(0o755)


def calls(folder: Path, name: str) -> list[list[str]]:
    """Returns the arguments of each call of a program of `program`, in their order."""
    path = folder / f"{name}.calls"
    text = path.read_text() if path.exists() else ""
    return [line.split("\0")[:-1] for line in text.split("END\0")[:-1]]


def environment(folder: Path, **more: str) -> Mapping[str, str]:
    """Returns this process's environment, with the programs of a folder before all others."""
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **more}


def check_flags(words: Sequence[str], known: Mapping[str, str]) -> None:
    """Checks that each of `--name=value` has a known name, and a value of its form."""
    for word in words:
        name, has_value, value = word.removeprefix("--").partition("=")
        assert name in known, f"{word}: there is no such option"
        assert re.fullmatch(known[name], value), f"{word}: the value has another form"
        assert has_value or not value
