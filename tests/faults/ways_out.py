"""Tests five ways in which a job can exit during a save, and full disks."""

import contextlib
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.faults.outcome import (
    Outcome,
    Row,
    last_step,
    outcome_of,
    steps_of,
    tail,
    temporary_files,
)
from tests.faults.zoo import SAVE_EVERY, home, train_argv
from tests.faults.zygote import Launch, Zygote

# The job exits during the save of this step, which is slowed down by a second at manifest.json.
NUM_STEPS = 4 * SAVE_EVERY
SETTINGS = (f"run.num_train_steps={NUM_STEPS}",)
_IN_FLIGHT = 2 * SAVE_EVERY
_SLOW = {
    "at": "open for writing",
    "matches": rf"/{_IN_FLIGHT}\.saving/manifest\.json",
    "do": "sleep",
}
WAYS_OUT = {
    "normal exit": (0, []),
    "exception": (1, [{"at": "batch", "index": _IN_FLIGHT, "do": "raise"}]),
    "sys.exit(7)": (7, [{"at": "batch", "index": _IN_FLIGHT, "do": "sys.exit"}]),
    "SIGTERM": (0, [{"at": "step", "nth": _IN_FLIGHT + 1, "do": "TERM"}]),
    "SIGINT": (0, [{"at": "step", "nth": _IN_FLIGHT + 1, "do": "INT"}]),
}


def leave(zygote: Zygote, whole: Outcome, names: list[str]) -> list[Row]:
    """Returns a row for each kind of exit, with the exit status and the number of lost steps."""
    rows = []
    for name in names:
        status, faults = WAYS_OUT[name]
        job = home() / f"left_by_{name.replace(' ', '_')}"
        launch = zygote.launch(train_argv(job, *SETTINGS), [_SLOW, *faults])
        row = Row(f"{name} during a save", 1, {"status": launch.code})
        rows.append(row)
        if launch.code != status:
            row.failures.append(tail(launch))
            continue
        lost = last_step(job) - max(steps_of(job), default=0)
        row.figures["steps lost"] = lost
        # An exception in step 7 occurs after 6 steps; a signal completes and saves its step.
        if lost:
            row.failures.append(f"{lost} steps lost: {tail(launch)}")
            continue
        row.failures += _wrong_in_the_end(zygote, job, whole)
    return rows


# (folder on the full disk, step of the save, number of retries). If there are retries, space is
# freed before the last one.
DISKS = (
    ("job/checkpoints", _IN_FLIGHT, 0),
    ("job/checkpoints", NUM_STEPS, 0),
    ("job", _IN_FLIGHT, 0),
    ("job/checkpoints", _IN_FLIGHT, 2),
)


def fill(
    zygote: Zygote, whole: Outcome, disks: Sequence[tuple[str, int, int]] = DISKS
) -> list[Row]:
    """Returns a row for each full disk, using real file systems in 4 MiB of memory."""
    rows = []
    for where, step, retries in disks:
        folder = Path(tempfile.mkdtemp(prefix="disk", dir=home()))
        save = "the last save" if step == NUM_STEPS else "an intermediate save"
        again = ", space freed before the last of 2 retries" if retries else ""
        row = Row(f"full disk at {where} during {save}{again}", 1)
        rows.append(row)
        # A job directory must be new or contain config.json, so create the job before mounting.
        if where != "job":
            faults = [{"at": "step", "nth": 1, "do": "KILL"}]
            zygote.launch(train_argv(folder / "job", *SETTINGS), faults)
        with _small_disk(folder / where):
            row.failures += _filled(zygote, whole, row, folder / "job", where, step, retries)
    return rows


def _filled(
    zygote: Zygote, whole: Outcome, row: Row, job: Path, where: str, step: int, retries: int
) -> list[str]:
    filler = job.parent / where / ".filler"
    settings = (*SETTINGS, f"run.checkpoints.retries={retries}")
    faults = [
        {"at": "now", "do": "retry soon"},
        {"at": "step", "nth": step, "do": "fill the disk", "path": str(filler)},
    ]

    def free(pid: int, out: Path) -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until and "No space left" not in out.read_text():
            time.sleep(0.05)
        filler.unlink(missing_ok=True)

    def meanwhile(pid: int, out: Path) -> None:
        if retries:
            threading.Thread(target=free, args=(pid, out), daemon=True).start()

    launch = zygote.launch(train_argv(job, *settings), faults, meanwhile=meanwhile)
    row.figures["status"] = launch.code
    row.figures["remaining steps"] = steps_of(job)
    filler.unlink(missing_ok=True)
    if retries:
        if launch.code != 0:
            return [f"did not continue: {tail(launch)}"]
    else:
        actual = _unlike_a_full_disk(launch, job, step)
        if actual:
            return [actual]
    # A retry saves the newest state instead of the state whose save failed.
    return _wrong_in_the_end(zygote, job, whole, all_steps=not retries)


def _unlike_a_full_disk(launch: Launch, job: Path, step: int) -> str | None:
    before = step - SAVE_EVERY
    if launch.code in (0, None):
        return f"status {launch.code}: {tail(launch)}"
    if before not in steps_of(job):
        return f"step {before} is missing: {steps_of(job)}"
    if left := temporary_files(job):
        return f"left behind: {', '.join(left)}"
    if "Traceback" in launch.err or "No space left" not in " ".join(launch.err.split()):
        return f"unclear: {tail(launch)}"
    return None


def _wrong_in_the_end(
    zygote: Zygote, job: Path, whole: Outcome, *, all_steps: bool = True
) -> list[str]:
    """Relaunches the job. Returns messages about its differences from an undisturbed job."""
    launch = zygote.launch(train_argv(job, *SETTINGS))
    if launch.code != 0:
        return [f"does not resume: {tail(launch)}"]
    left = temporary_files(job)
    actual = outcome_of(job).differences(whole, all_steps=all_steps)
    return [*actual, *([f"left behind: {', '.join(left)}"] if left else [])]


def can_mount() -> bool:
    """Returns whether this user can mount a file system."""
    try:
        with tempfile.TemporaryDirectory() as folder, _small_disk(Path(folder) / "disk"):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


@contextlib.contextmanager
def _small_disk(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], check=True, capture_output=True
    )
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)
