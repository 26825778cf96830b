"""A job's directory that is gone, or is another thing by now, while the job trains."""

import shutil

import pytest

from praxis_lite.job.job_dir import JobDir
from praxis_lite.trainer import launch as launching
from praxis_lite.trainer import starting_point, training_loop
from praxis_lite.trainer.hooks import saves
from tests.support.job_runs import home, launch
from tests.support.line_jobs import LINE


def deleted(path):
    shutil.rmtree(path)


def emptied(path):
    shutil.rmtree(path)
    path.mkdir()


def renamed(path):
    path.rename(path.with_name("elsewhere"))


def a_file(path):
    shutil.rmtree(path)
    path.write_text("x")


PLACES = [
    (saves.Saves, "save"),
    (training_loop, "check_ids"),
    (starting_point, "compile_init"),
    (launching, "write_layout"),
    (JobDir, "locked"),
    (launching, "unsound_end"),
]
QUICK = [(deleted, PLACES[0])]
SLOW = [
    *((deleted, place) for place in PLACES[1:]),
    (emptied, PLACES[4]),
    *((how, PLACES[0]) for how in (emptied, renamed, a_file)),
]


@pytest.mark.parametrize(
    ("how", "place"),
    [*QUICK, *(pytest.param(*item, marks=pytest.mark.slow) for item in SLOW)],
    ids=lambda item: item[1] if isinstance(item, tuple) else item.__name__,
)
def test_a_job_whose_directory_is_gone_ends_with_a_paragraph(how, place, tmp_path, monkeypatch):
    home()
    owner, name = place
    before, path, is_done = getattr(owner, name), tmp_path / "job", []

    def first_gone(*args, **kwargs):
        if not is_done:
            is_done.append(how(path))
        return before(*args, **kwargs)

    monkeypatch.setattr(owner, name, first_gone)
    done = launch(LINE, f"--job_log_dir={path}", "--set", "run.num_train_steps=3")
    assert "Traceback" not in done.err
    if done.code == 0:  # An empty directory is a new job's; and at the end all was saved.
        assert name in ("locked", "unsound_end")
    else:
        assert done.code in (1, 2) and done.err.startswith("error: ") and str(path) in done.err
