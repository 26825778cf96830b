"""Commands of the library: errors in a paragraph, signals and lost output; nothing half written."""

import errno
import fcntl
import functools
import io
import os
import signal
import sys

import pytest

from praxis_lite import ConfigError
from praxis_lite.core.user_lines import user_line
from praxis_lite.host.atomic_files import new_directory
from praxis_lite.huggingface.tensors.writing import save_tensors
from praxis_lite.job.command import run
from praxis_lite.trainer.create_job import new_job_dir
from tests.job.test_disk_full import files_of_at_most
from tests.support.commands import praxis, status_of
from tests.support.goldens import GOLDENS

SYNTHETIC = "lm.Synthetic"


@pytest.mark.parametrize(
    "words",
    [
        "tokenizers train TEXT FILE",
        "tokenizers train TEXT FILE/x",
        "tokenizers train TEXT /proc/x",
        "tokenizers train TEXT gs:///x",
        "tokenizers train TEXT file:///x",
        "tokenizers train TEXT DIR --chat-template=FILE/x",
        "tokenizers train gs:///*.txt DIR",
        "tokenizers train TEXT",
        "tokenizers grow",
        "hf import gs:///model DIR",
        "hf import DIR/gone DIR/job",
        "hf import FILE DIR/job",
        "hf import LLAMA gs:///job",
        "hf import LLAMA FILE",
        "hf import LLAMA FILE/x",
        "hf import LLAMA /proc/x",
        "hf export gs:///job DIR",
        "hf export DIR DIR --step=newest",
        "hf export DIR DIR --adapters=both",
        "hf import LLAMA DIR --sat x=1",
        "hf ",
        "pax lm.Synthetic --pax=gs:///x --job_log_dir=DIR",
        "pax lm.Synthetic --pax=FILE --job_log_dir=DIR",
        "pax lm.Synthetic --pax=DIR/gone --job_log_dir=DIR",
        "pax lm.Synthetic",
        "inputs digest lm.Synthetic --start=99999999999999999999",
        "inputs digest lm.Nothing",
        "inputs prepare",
        "checkpoints ls FILE",
        "checkpoints ls gs:///job",
        "checkpoints ls",
    ],
)
def test_what_a_user_can_mend_is_a_paragraph_and_nothing_is_made(
    words, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("some text")
    (tmp_path / "file").write_text("a file")
    (tmp_path / "dir").mkdir()
    for word, path in {"TEXT": "text", "FILE": "file", "DIR": "dir"}.items():
        words = words.replace(word, str(tmp_path / path))
    assert praxis(*words.replace("LLAMA", str(GOLDENS / "hf/llama")).split()) == 2
    err = capsys.readouterr().err
    # Warnings about modules that cannot be imported may come first.
    assert err.partition("error:")[1] and "Traceback" not in err and "traceback" not in err
    assert sorted(os.listdir(tmp_path)) == ["dir", "file", "text"]
    assert os.listdir(tmp_path / "dir") == []


def test_a_memory_that_does_not_suffice_is_not_said_before_the_path_of_pax(tmp_path, capsys):
    assert (
        praxis(
            "pax",
            "lm.Synthetic",
            "--pax=/nope",
            f"--job_log_dir={tmp_path}/job",
            "--set",
            "task.model.model_dims=1000000",
        )
        == 2
    )
    assert capsys.readouterr().err.startswith("error: /nope is not a directory")


LONG_PATH = "/of-many-words" * 9  # It can be copied from the terminal, so it is not wrapped.


def raising(error):
    def fails():
        raise error

    return fails


@pytest.mark.parametrize(
    "fails, code, expected",
    [
        (functools.partial(os.mkdir, "/proc/x"), 2, "error: /proc/x: No such file or directory."),
        (
            raising(OSError(errno.ENOSPC, "No space left on device", "/x")),
            2,
            "/x could not be written: No space left on device",
        ),
        (raising(ConfigError("mend it")), 2, "error: mend it"),
        (raising(ConfigError(f"{LONG_PATH} is missing")), 2, f"error: {LONG_PATH} is missing"),
        (raising(KeyboardInterrupt()), 128 + signal.SIGINT, "ended by SIGINT"),
    ],
)
def test_an_error_ends_a_command_in_a_paragraph(fails, code, expected, capsys):
    assert status_of(fails, continues_without_output=True) == code
    err = capsys.readouterr().err
    assert expected in " ".join(err.split()) and "Traceback (most" not in err


def test_a_signal_ends_a_command_with_its_number(capfd):
    def waits():
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()

    assert status_of(waits, continues_without_output=True) == 128 + signal.SIGTERM
    assert "ended by SIGTERM" in capfd.readouterr().err


@pytest.mark.parametrize("continues, code", [(True, 0), (False, 128 + signal.SIGPIPE)])
def test_a_command_whose_output_is_lost_makes_what_it_makes(continues, code, monkeypatch, capfd):
    null, result = os.open(os.devnull, os.O_WRONLY), []

    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

        def fileno(self):
            return null

    monkeypatch.setattr(sys, "stdout", Closed())

    def command():
        print("made it", flush=True)
        result.append(7)

    assert status_of(command, continues_without_output=continues) == code
    os.close(null)
    assert result == [7] * continues
    assert "Traceback" not in capfd.readouterr().err


def test_a_status_of_a_command_is_its_own():
    assert status_of(lambda: 1, continues_without_output=True) == 1
    with pytest.raises(SystemExit) as ended:
        run(lambda: 3, continues_without_output=lambda: True)
    assert ended.value.code == 3
    run(lambda: 0, continues_without_output=lambda: True)


def test_a_directory_is_written_whole_or_stays_as_it_was(tmp_path, monkeypatch):
    target = tmp_path / "out"

    def write(folder):
        for name in ("last.json", "a.bin", "b.bin"):
            (folder / name).write_text(name)

    with (
        pytest.raises(ConfigError, match="/out .*File too large"),
        new_directory(target, "last.json") as folder,
        files_of_at_most(3),
    ):
        write(folder)
    assert not target.exists()
    # What a killed process left goes; what is its user's does not.
    (target / ".partial").mkdir(parents=True)
    (target / ".partial/old").write_text("half")
    order = []
    replace = os.replace

    def moves(source, to):
        order.append(os.path.basename(to))
        if len(order) == 2:
            raise OSError(errno.EIO, "Input/output error", str(to))
        replace(source, to)

    monkeypatch.setattr(os, "replace", moves)
    with (
        pytest.raises(ConfigError, match="Input/output"),
        new_directory(target, "last.json") as folder,
    ):
        write(folder)
    assert os.listdir(target) == [] and order == ["a.bin", "b.bin"]
    with new_directory(target, "last.json") as folder:
        write(folder)
    assert sorted(os.listdir(target)) == ["a.bin", "b.bin", "last.json"]
    assert order[-1] == "last.json"
    with (
        pytest.raises(ConfigError, match=".a.bin.*b.bin.*last.json"),
        new_directory(target, "last.json"),
    ):
        pytest.fail("files are written over")


def test_tensors_for_which_there_is_no_room_are_an_error_of_the_disk(tmp_path):
    import numpy as np

    with files_of_at_most(1000), pytest.raises(OSError) as full:
        save_tensors({"w": np.zeros(1301, np.float32)}, tmp_path / "x.safetensors")
    assert full.value.errno == errno.EFBIG and full.value.filename.endswith("x.safetensors")


def test_an_import_that_fails_leaves_no_files(tmp_path):
    path = tmp_path / "job"
    with (
        pytest.raises(OSError, match="No space left"),
        new_job_dir(path, SYNTHETIC) as job_dir,
    ):
        job_dir.huggingface.mkdir()
        job_dir.write_config("{}", [])
        raise OSError(errno.ENOSPC, "No space left on device")
    assert os.listdir(path) == [".training"]
    with (
        open(path / ".training") as lock,
        pytest.raises(ConfigError, match="job_log_dir=.*/job is in use"),
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        with new_job_dir(path, SYNTHETIC):
            pytest.fail("two commands write the directory")
    with new_job_dir(path, SYNTHETIC) as job_dir:
        job_dir.write_config("{}", [])
    assert sorted(os.listdir(path)) == [".training", "config.json", "config.txt"]


def test_the_script_that_pip_creates_is_not_code_of_the_user():
    try:
        exec(compile("raise ZeroDivisionError", "/venv/bin/praxis", "exec"))
    except ZeroDivisionError as error:
        assert user_line(error).filename == __file__
