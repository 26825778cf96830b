"""Uses the library's objects, files, leases and steps behind a proxy that injects faults.

Each function repeats random operations until the proxy has injected some faults, and compares the
store with a model: a dict of the objects, a list of lines, the holder of a lease. The store is read
without the proxy.
"""

import contextlib
import dataclasses
import itertools
import json
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from praxis_lite.core.errors import ConfigError, Error
from praxis_lite.host.object_stores import ObjectChanged, StorePath
from praxis_lite.host.places import local_file, local_files, local_folder
from praxis_lite.inputs import FromSource, JsonLines
from praxis_lite.job import job_lock, mirror
from praxis_lite.job.job_lock import Lease
from praxis_lite.job.mirror import Mirror
from tests.support.faulty_store import FaultyProxy


@dataclasses.dataclass
class Trial:
    """A store behind a proxy, and the results so far.

    Attributes:
      url: URL of the bucket.
      proxy: The proxy.
      client: An obstore client that does not use the proxy.
      seed: Seed of the operations.
      raised: The last kind of fault before each error, and the error's message.
      failures: A message for each lost, duplicated or wrong object, line, lease or step.
      done: Number of operations.
    """

    url: str
    proxy: FaultyProxy
    client: Any
    seed: int
    raised: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    failures: list[str] = dataclasses.field(default_factory=list)
    done: int = 0

    @contextlib.contextmanager
    def clear_errors(self) -> Iterator[None]:
        """Counts a ConfigError that follows a fault. All other errors are failures."""
        before = len(self.proxy.injected)
        try:
            yield
        except Error as error:
            if len(self.proxy.injected) == before:
                self.failures.append(f"raised without a fault: {error}")
            self.raised.append((self.proxy.injected[-1], str(error)))
        except OSError as error:
            self.failures.append(f"{type(error).__name__}: {error}")
        self.done += 1

    def check(self, holds: bool, message: str) -> None:
        if not holds:
            self.failures.append(f"{message}, after {self.proxy.injected[-5:]}")

    def stored(self, name: str) -> bytes | None:
        """Returns the content of an object, without the proxy."""
        try:
            return bytes(self.client.get(name).bytes())
        except FileNotFoundError:
            return None

    def until(self, num_faults: int) -> Iterator[random.Random]:
        """Yields a random generator until this number of further faults is injected."""
        end = len(self.proxy.injected) + num_faults
        rng = random.Random(self.seed)
        while len(self.proxy.injected) < end and not self.failures:
            yield rng


def objects(trial: Trial, num_faults: int) -> None:
    """Reads, writes, copies, lists and deletes objects."""
    folder = StorePath.opened(f"{trial.url}/objects")
    model: dict[str, bytes] = {}
    for rng in trial.until(num_faults):
        name = f"{rng.randrange(3)}/{rng.randrange(3)}"
        path, content = folder / name, rng.randbytes(rng.randrange(1, 3000))
        allowed = {model.get(name)}
        action = rng.choice(("write", "create", "replace", "read", "unlink", "files", "copy", "rm"))
        with trial.clear_errors(), tempfile.TemporaryDirectory() as temporary:
            file = Path(temporary, "file")
            if action == "write":
                allowed.add(content)
                path.write_bytes(content)
                allowed = {content}
            elif action in ("create", "replace"):
                allowed.add(content)
                mode = "create"
                if action == "replace" and name in model:
                    mode = path.read_version()[1].version
                exists = mode == "create" and name in model
                try:
                    path.write_bytes(content, mode)
                    allowed = {content}
                    trial.check(not exists, f"{name} was created, but existed")
                except ObjectChanged:
                    # Only a lost answer makes the write of a single writer fail.
                    allowed = {model.get(name)} if exists else {content}
            elif action == "read":
                try:
                    trial.check(path.read_bytes() == model.get(name), f"{name} was read wrong")
                    path.download(file)
                    trial.check(file.read_bytes() == model.get(name), f"{name} was copied wrong")
                except FileNotFoundError:
                    trial.check(name not in model, f"{name} was not found")
            elif action == "copy":
                content *= 3000 if rng.random() < 0.1 else 1  # Several parts.
                allowed.add(content)
                file.write_bytes(content)
                path.upload(file)
                allowed = {content}
            elif action == "unlink":
                allowed.add(None)
                path.unlink()
                allowed = {None}
            elif action == "files":
                sizes = {name: status.st_size for name, status in folder.newest_files().items()}
                expected = {name: len(content) for name, content in sorted(model.items())}
                trial.check(sizes == expected, f"listed {sizes}, expected {expected}")
            else:
                (folder / name[0]).remove_folder()
                for other in [other for other in model if other.startswith(f"{name[0]}/")]:
                    trial.check(trial.stored(f"objects/{other}") is None, f"{other} remains")
                    model.pop(other)
                allowed = {None}
        if action == "rm":
            for other in [other for other in model if other.startswith(f"{name[0]}/")]:
                if trial.stored(f"objects/{other}") is None:
                    model.pop(other)
            continue
        actual = trial.stored(f"objects/{name}")
        trial.check(actual in allowed, f"{action} of {name}: wrong content")
        model[name] = actual
        if actual is None:
            del model[name]


def appended_lines(trial: Trial, num_faults: int) -> None:
    """Appends lines to files of a job, uploads them, and continues from the store after kills."""
    folder = StorePath.opened(f"{trial.url}/mirror", writes=True)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as temporary:
        patch.setattr(mirror, "_PART_BYTES", 100)
        num_lines = dict.fromkeys(("metrics.jsonl", "logs/log.txt"), 0)
        num_uploaded = dict(num_lines)
        current = _mirror(trial, folder, temporary)
        for rng in trial.until(num_faults):
            for name, start in num_lines.items():
                path = current.folder / name
                path.parent.mkdir(exist_ok=True)
                num_lines[name] += rng.randrange(6)
                with path.open("a") as file:
                    file.writelines(f"line {i}\n" for i in range(start, num_lines[name]))
            is_killed = rng.random() < 0.3
            with trial.clear_errors(), contextlib.suppress(_Killed):
                with _killed_at(rng.randrange(5)) if is_killed else contextlib.nullcontext():
                    current.upload()
                num_uploaded = dict(num_lines)
            if not is_killed:
                continue
            current = _mirror(trial, folder, temporary)
            for name in num_lines:
                path = current.folder / name
                found = path.read_text().splitlines(True) if path.exists() else []
                lines = [line for line in found if line.endswith("\n")]
                expected = [f"line {i}\n" for i in range(len(lines))]
                trial.check(lines == expected, f"{name} has lost or repeated lines")
                trial.check(len(lines) >= num_uploaded[name], f"{name} lost its last lines")
                if path.exists():
                    path.write_text("".join(lines))
                num_lines[name] = len(lines)
            num_uploaded = dict.fromkeys(num_lines, 0)


def _mirror(trial: Trial, folder: StorePath, temporary: str) -> Mirror:
    """Returns a new mirror that has downloaded the job's files."""
    while True:
        new = Mirror(folder, Path(tempfile.mkdtemp(dir=temporary)))
        is_downloaded = False
        with trial.clear_errors():
            new.download(newest=True)
            is_downloaded = True
        if is_downloaded:
            return new


class _Killed(BaseException):
    """Ends an upload, as SIGKILL would."""


@contextlib.contextmanager
def _killed_at(number: int) -> Iterator[None]:
    """Raises _Killed before or after a write of an object."""
    write, numbers = StorePath.write_bytes, itertools.count()

    def write_bytes(self: StorePath, content: bytes, *args: Any) -> str:
        count = next(numbers)
        if count * 2 == number:
            raise _Killed
        tag = write(self, content, *args)
        if count * 2 + 1 == number:
            raise _Killed
        return tag

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StorePath, "write_bytes", write_bytes)
        yield


def leases(trial: Trial, num_faults: int) -> None:
    """Lets three threads compete for a lease."""
    folder, holders, ended = StorePath.opened(f"{trial.url}/lease"), [], []
    end = len(trial.proxy.injected) + num_faults

    def compete(number: int) -> None:
        rng = random.Random(f"{trial.seed} {number}")
        while len(trial.proxy.injected) < end and not trial.failures:
            # "In use" is raised without a fault.
            with contextlib.suppress(ConfigError), Lease(folder) as lease:
                trial.check(not holders, "two hold the lease")
                holders.append(number)
                time.sleep(rng.random() * 0.5)
                holders.remove(number)
                lease.check()
                trial.done += 1
            time.sleep(rng.random() * 0.1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job_lock, "LEASE_SECONDS", 5.0)
        patch.setattr(job_lock, "_RENEW_SECONDS", 0.1)
        patch.setattr(job_lock, "end_now", lambda status, why: ended.append(why))
        threads = [threading.Thread(target=compete, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    trial.check(not ended, f"a lease was lost: {ended}")


def data_files(trial: Trial, num_faults: int) -> None:
    """Reads files that change, as sources of data do."""
    folder, versions = StorePath.opened(f"{trial.url}/data"), {}
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as cache:
        patch.setenv("XDG_CACHE_HOME", cache)
        for rng in trial.until(num_faults):
            name = f"{rng.randrange(3)}.txt"
            with trial.clear_errors():
                text = str(rng.random())
                versions.setdefault(name, []).append(text)
                (folder / name).write_bytes(text.encode())
            num_listings = trial.proxy.injected.count("outdated listing")
            read = {}
            with trial.clear_errors():
                kind = rng.randrange(3)
                if kind == 0:
                    read = {name: local_file(f"{folder}/{name}").read_text()}
                else:
                    found = local_folder(str(folder)) if kind == 1 else None
                    found = found or Path(local_files(f"{folder}/*.txt")).parent
                    read = {path.name: path.read_text() for path in found.glob("*.txt")}
            for name, text in read.items():
                if text != versions[name][-1]:
                    is_outdated = trial.proxy.injected.count("outdated listing") > num_listings
                    trial.check(is_outdated and text in versions[name], f"{name} is outdated")


def examples(trial: Trial, num_faults: int) -> None:
    """Reads the shuffled rows of 1 to 8 processes, each of which downloads the files itself."""
    lines = [json.dumps({"x": number}) + "\n" for number in range(5 * 31)]
    files = {f"{k}.jsonl": "".join(lines[k::5]).encode() for k in range(5)}

    def rows_of(place: str, rows: slice) -> np.ndarray:
        data = FromSource(JsonLines(f"{place}/*.jsonl"), 13, shuffle=True)
        return np.stack(
            [data.rows(index, rows)["x"][: rows.stop - rows.start] for index in range(20)]
        )

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        for name, content in files.items():
            Path(folder, name).write_bytes(content)
            trial.client.put(f"examples/{name}", content)
        expected = rows_of(folder, slice(0, 13))
        for rng in trial.until(num_faults):
            num_processes, parts = rng.randint(1, 8), []
            bounds = np.linspace(0, 13, num_processes + 1).astype(int).tolist()
            with trial.clear_errors():
                for rows in itertools.starmap(slice, itertools.pairwise(bounds)):
                    with tempfile.TemporaryDirectory() as cache:
                        patch.setenv("XDG_CACHE_HOME", cache)
                        parts.append(rows_of(f"{trial.url}/examples", rows))
                actual = np.concatenate(parts, axis=1)
                trial.check(np.array_equal(actual, expected), f"{num_processes} processes")


def steps(trial: Trial, num_faults: int) -> None:
    """Saves and restores the steps of a job, and rolls some of them back."""
    from praxis_lite.checkpoints.checkpoints import Checkpoints
    from praxis_lite.checkpoints.steps.save_settings import SaveSettings
    from tests.checkpoints.test_checkpoints import SMALL, small_state
    from tests.checkpoints.test_damage import mesh

    folder, notes = StorePath.opened(f"{trial.url}/job/checkpoints"), []
    newest = 0  # The newest step that is known to be saved; later ones may be.
    for rng in trial.until(num_faults):
        settings = SaveSettings(max_to_keep=2, retries=3, retry_seconds=0.1)
        with trial.clear_errors(), Checkpoints(folder, saving=settings, note=notes.append) as job:
            found = job.latest_step() or 0
            trial.check(found >= newest, f"step {newest} was lost; {found} is the newest")
            newest = found
            for step in range(newest + 1, newest + 1 + rng.randrange(4)):
                job.save(step, small_state(mesh(), step), SMALL, {"next_batch": step})
                job.wait()
                newest = step
            if rng.random() < 0.2 and newest > 1:
                rolled_back, newest = newest, 0
                job.abandon_after(rolled_back - 1)
                newest = job.latest_step() or 0
                trial.check(newest == rolled_back - 1, f"step {newest} after a roll-back")
        if newest:
            with trial.clear_errors():
                restored = Checkpoints(folder, note=notes.append).restore(SMALL, mesh())
                actual = float(restored.state.mdl_vars["params"]["w"][0, 0])
                trial.check(actual == restored.step == restored.data["next_batch"], "wrong values")
                trial.check(restored.step >= newest, f"{restored.step} restored, not {newest}")
    trial.check(not any("damaged" in note for note in notes), f"{notes}")


OPERATIONS: tuple[Callable[[Trial, int], None], ...] = (
    objects,
    appended_lines,
    leases,
    data_files,
    examples,
    steps,
)
