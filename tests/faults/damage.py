"""Damage: flipped bits, files that are truncated, emptied, deleted or swapped, and stray folders.

Each kind of damage is applied to a copy of a killed job, which is then resumed. The job must report
the damage in one line and resume from the previous step, and its results must be bitwise equal to
those of an undamaged job.
"""

import random
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.faults.outcome import Row, outcome_of, restored_step, steps_of, tail
from tests.faults.zoo import SAVE_EVERY, home, train_argv
from tests.faults.zygote import Launch, Zygote

# Jobs are killed after step 10, with checkpoints of steps 6 and 9, and resumed up to step 12.
NUM_STEPS, STOPPED_AT = 4 * SAVE_EVERY, 3 * SAVE_EVERY + 1
SETTINGS = (f"run.num_train_steps={NUM_STEPS}",)


def files_of(step_dir: Path) -> list[Path]:
    """Returns the files of a checkpoint, in order."""
    return sorted(path for path in step_dir.rglob("*") if path.is_file())


def flip_bit(file: Path, bit: int) -> None:
    """Flips a bit of a file. `bit` counts from the start of the file, modulo its size."""
    data = bytearray(file.read_bytes())
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    file.write_bytes(data)


def flips(step_dir: Path, num_flips: int, seed: int) -> Iterator[tuple[str, Path, Callable]]:
    """Yields (description, file, action) for single bits, spread evenly over the files."""
    rng = random.Random(seed)
    files = [file for file in files_of(step_dir) if file.stat().st_size]
    for index in range(num_flips):
        file = files[index % len(files)]
        bit = rng.randrange(8 * file.stat().st_size)
        yield f"bit {bit} flipped", file, lambda file=file, bit=bit: flip_bit(file, bit)


def broken_files(step_dir: Path, other: Path) -> Iterator[tuple[str, Path, Callable]]:
    """Yields (description, file, action) that truncate, empty, delete or swap each file.

    A file is swapped with the corresponding file in the step `other`.
    """
    for index, file in enumerate(files_of(step_dir)):
        if file.stat().st_size:
            data = file.read_bytes()
            yield "truncated", file, lambda file=file, data=data: file.write_bytes(data[:-1])
            yield "emptied", file, lambda file=file: file.write_bytes(b"")
        yield "deleted", file, lambda file=file: file.unlink()
        like = other / file.relative_to(step_dir)
        if not like.is_file():
            # Names of data files differ between steps, so use the file at the same index.
            like = files_of(other)[index % len(files_of(other))]
        if like.read_bytes() != file.read_bytes():
            yield "swapped with another step's", file, lambda a=file, b=like: shutil.copyfile(b, a)


def strays(checkpoints: Path) -> Iterator[tuple[str, str, Callable]]:
    """Yields (description, word that the report must contain, action) for invalid step folders."""
    newest = checkpoints / str(3 * SAVE_EVERY)

    def folder(name: str, *files: str) -> Callable[[], None]:
        def make() -> None:
            (checkpoints / name).mkdir()
            for file in files:
                (checkpoints / name / file).write_text("{}")

        return make

    def half_deleted(name: str | None) -> Callable[[], None]:
        def make() -> None:
            for file in files_of(newest)[::2]:
                file.unlink()
            if name:
                newest.rename(checkpoints / name)

        return make

    yield "empty 999/", "999", folder("999")
    yield "999/ with an empty commit.json", "999", folder("999", "commit.json", "manifest.json")
    yield "empty 999.saving/", "999.saving", folder("999.saving")
    yield "999.saving/ with files", "999.saving", folder("999.saving", "manifest.json")
    yield "empty 3.deleting/", "3.deleting", folder("3.deleting")
    yield "a partially deleted step", "9", half_deleted(None)
    yield "a partially deleted step, renamed", "9.deleting", half_deleted("9.deleting")
    yield "a copy of step 9 as 11/", "11", lambda: shutil.copytree(newest, checkpoints / "11")
    yield "a file named 999", "", (checkpoints / "999").touch
    yield "a folder named notes", "", folder("notes", "todo.txt")
    yield "a folder named 009", "", folder("009")
    yield "a folder named -1", "", folder("-1")
    yield "a folder named ٣", "", folder("٣")
    yield "a step below a symlink", "999", lambda: (checkpoints / "999").symlink_to(newest)


class Damage:
    """Damages copies of a killed job, and checks how they resume.

    Attributes:
      whole: Outcome of an undamaged job.
      job: Directory of the killed job, which is only copied.
    """

    def __init__(self, zygote: Zygote):
        self._zygote, self._num_jobs = zygote, 0
        self._folder = Path(tempfile.mkdtemp(prefix="damage", dir=home()))
        self.job, whole = self._folder / "killed", self._folder / "whole"
        for job, faults in (
            (whole, ()),
            (self.job, [{"at": "step", "nth": STOPPED_AT, "do": "KILL when saved"}]),
        ):
            launch = zygote.launch(train_argv(job, *SETTINGS), faults)
            assert launch.code == (-9 if faults else 0), tail(launch)
        self.whole = outcome_of(whole)
        assert steps_of(self.job) == [2 * SAVE_EVERY, 3 * SAVE_EVERY], steps_of(self.job)

    def copy(self) -> Path:
        """Returns a copy of the killed job."""
        self._num_jobs += 1
        return Path(shutil.copytree(self.job, self._folder / f"copy{self._num_jobs}"))

    def files(self, row: Row, cases: Callable, say: Callable[[str], None] = print) -> Row:
        """Adds the results for damaged files to a row. `cases` takes (step 9, step 6)."""
        checkpoints = self.job / "checkpoints"
        names = [str(3 * SAVE_EVERY), str(2 * SAVE_EVERY)]
        total = len(list(cases(*(checkpoints / name for name in names))))
        for index in range(total):
            job = self.copy()
            step_dirs = [job / "checkpoints" / name for name in names]
            what, file, act = list(cases(*step_dirs))[index]
            act()
            told = f"{file.relative_to(step_dirs[0])} {what}"
            self._goes_on(row, job, told, names[0], str(file.relative_to(step_dirs[0])))
            if index % 10 == 9:
                say(f"  {row.line()} ({total} in total)")
        return row

    def folders(self, row: Row) -> Row:
        """Adds the results for stray and partially deleted folders to a row."""
        for index in range(len(list(strays(self.job / "checkpoints")))):
            job = self.copy()
            what, expected, act = list(strays(job / "checkpoints"))[index]
            act()
            self._goes_on(row, job, what, expected, "")
        return row

    def _goes_on(self, row: Row, job: Path, told: str, *words: str) -> None:
        """Launches a damaged job, which must print a line that contains all `words`."""
        launch = self._zygote.launch(train_argv(job, *SETTINGS))
        row.tried += 1
        actual = self._wrong(launch, job, [word for word in words if word])
        if actual:
            row.failures.append(f"{told}: {actual}")
            return
        shutil.rmtree(job)

    def _wrong(self, launch: Launch, job: Path, words: list[str]) -> str | None:
        if launch.code != 0 or launch.err:
            return f"crash: {tail(launch)}"
        kept = job / "checkpoints"
        # The lines after the experiment and the mesh, and before training.
        message = re.split(r"restored the checkpoint|initializing the state", launch.out)[0]
        lines = message.splitlines()[2:]
        if words and not any(all(_has(line, word) for word in words) for line in lines):
            return f"silent: restored {restored_step(launch)}, no line contains {words}: {lines}"
        differing = outcome_of(job).differences(self.whole)
        if differing:
            names = sorted(path.name for path in kept.iterdir())
            return f"restored {restored_step(launch)}, but {'; '.join(differing)}; left {names}"
        return None


def _has(line: str, word: str) -> bool:
    """Returns whether a line contains a step or a file as a separate word."""
    return re.search(rf"(?<![\w.]){re.escape(word)}(?![\w])", line) is not None
