"""The steps of a directory that may be used: the complete ones, each verified before its first use.

A step is verified once per process: the newest when a job starts, others when they are asked for.
That reads every byte of it, under a second per GiB that is in memory, else as fast as the disk. A
listing reads nothing. The job whose directory it is sets a damaged step aside; one that only reads
leaves it where it is, for a training process may be at work there.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from praxis_lite.checkpoints.steps import step_dirs, step_files
from praxis_lite.checkpoints.steps.retention import BestCheckpoints
from praxis_lite.core.errors import ConfigError, few

Step = int | Literal["best"] | None  # None stands for the newest.
Metrics = Mapping[int, Mapping[str, float]]


class StepLost(ConfigError):
    """A step that cannot be used: it is not there, was deleted while it was read, or is damaged."""


class VerifiedSteps:
    """The steps of a directory.

    Args:
      owned: by this job: repairs and sets aside.
      note: told, a line each, of what is damaged and what is done about it.
      evaluated: returns metrics by step that came after the save; those of the save come first.
    """

    def __init__(
        self, directory: Path, *, owned: bool, note: Callable[[str], None],
        evaluated: Callable[[], Metrics] = dict,
    ):
        self.directory, self._owned, self._note = directory, owned, note
        self._evaluated = evaluated
        self._verified: set[int] = set()
        self._skipped: set[int] = set()
        self._manifests: dict[int, Mapping[str, Any]] = {}

    def repair(self) -> None:
        """Clears away the leftovers of a kill; ends a save that lacked only its last rename."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for path in step_dirs.set_aside(self.directory, *step_dirs.LEFTOVERS):
            step = path.name.removesuffix(".saving")
            if step.isdecimal() and step_dirs.is_committed(path) and not step_files.verify(path):
                step_dirs.publish(path, self.directory / step)
                self._note(f"the save of step {step} was whole but for its name: it has it now")
        for path in step_dirs.set_aside(self.directory, *step_dirs.LEFTOVERS):
            what = "deletion" if ".deleting" in path.name else "save"
            if self._removes(path):
                self._note(f"removed {path.name}, left by a {what} that was cut short")
        for step in step_dirs.numbered_steps(self.directory):
            if not step_dirs.is_committed(self._dir(step)):
                self._refuse(step, step_files.verify(self._dir(step)))

    def committed(self) -> list[int]:
        """Returns the steps that have a commit, in order, but for those found damaged."""
        return [s for s in step_dirs.committed_steps(self.directory) if s not in self._skipped]

    def newest(self) -> int | None:
        """Returns the newest whole step, or None if there never was a step.

        Raises:
          ConfigError: there are steps, and all are damaged.
        """

        def listed() -> list[int]:
            steps = step_dirs.numbered_steps(self.directory)
            return [step for step in reversed(steps) if step not in self._skipped]

        step = self._first_whole(listed)
        if step is None:
            lost = [str(step) for step in sorted(self._skipped) if self._dir(step).exists()]
            lost += [path.name for path in step_dirs.set_aside(self.directory, "damaged")]
            if lost:
                raise ConfigError(
                    f"No checkpoint in {self.directory} can be used: {', '.join(lost)} "
                    f"{'is' if len(lost) == 1 else 'are'} damaged. Put back a copy that is whole, "
                    "or, to start anew, remove what is damaged or name another directory."
                )
        return step

    def best(self, wanted: BestCheckpoints | None) -> int | None:
        """Returns the best whole step, or None if no step has the metric.

        Args:
          wanted: what is best; None for what the newest step was saved with.
        """
        if wanted is None:
            newest = self.newest()
            recorded = None if newest is None else self.manifest(newest)["best"]
            if recorded is None:
                return None
            wanted = BestCheckpoints(**recorded)
        return self._first_whole(lambda: wanted.ranked(self.metrics()))

    def choose(self, step: Step, best: BestCheckpoints | None) -> int:
        """Returns the step that is meant, verified.

        Raises:
          StepLost: there is no such step, or it is damaged.
          ConfigError: there is no step at all, or all are damaged.
        """
        result = self.newest() if step is None else self.best(best) if step == "best" else step
        steps = self.committed()
        if not steps:
            raise ConfigError(
                f"There is no checkpoint in {self.directory}. Train first with --mode=train, or "
                "name the directory of a job that was trained."
            )
        if result not in steps:
            what = f"no checkpoint of step {step}"
            if step == "best":
                what = "no best checkpoint, for none was saved with the metric to judge it by,"
            raise StepLost(
                f"There is {what} in {self.directory}; it has the steps "
                f"{', '.join(map(str, steps))}. Name one of them, or leave the step out for "
                "the newest."
            )
        if wrong := self._wrong(result):
            others = ", ".join(str(item) for item in steps if item != result)
            advice = f"Name another step, of {others}." if others else "There is no other."
            if self._owned:
                self._refuse(result, wrong)
            raise StepLost(
                f"The checkpoint of step {result} in {self.directory} is damaged: "
                f"{few(wrong, separator='; ')}. {advice}"
            )
        return result

    def manifest(self, step: int) -> Mapping[str, Any]:
        """Returns the manifest of a step, or {} if it is damaged."""
        if step not in self._manifests:
            manifest, wrong = step_files.committed_manifest(self._dir(step))
            if wrong:
                return {}
            self._manifests[step] = manifest
        return self._manifests[step]

    @contextlib.contextmanager
    def read(self, step: int) -> Iterator[Mapping[str, Any]]:
        """Yields the manifest of a step, whose files are read in this context.

        Raises:
          StepLost: on the way in or out: the step was deleted meanwhile, by the job that trains.
        """
        deleted = StepLost(
            f"The checkpoint of step {step} in {self.directory} was deleted while it was read, by "
            "the job that trains there: try again."
        )
        manifest, before = self.manifest(step), step_dirs.identity(self._dir(step))
        if not manifest or before is None:
            raise deleted
        try:
            yield manifest
        except ConfigError as error:
            if step_dirs.identity(self._dir(step)) != before:
                raise deleted from error
            raise
        # A deletion begins with a rename: files of a folder that has its name still are all there.
        if step_dirs.identity(self._dir(step)) != before:
            raise deleted

    def forget(self, step: int) -> None:
        """Forgets the record of a step: another was saved with its number, or it is gone."""
        self._verified.discard(step)
        self._skipped.discard(step)
        self._manifests.pop(step, None)

    def delete(self, steps: Collection[int]) -> None:
        """Deletes these steps, and the abandoned ones."""
        for path in step_dirs.set_aside(self.directory, "abandoned"):
            self._removes(path)
        for step in steps:
            try:
                step_dirs.remove(self._dir(step))
            except OSError as error:
                self._note(f"the checkpoint of step {step} cannot be deleted ({error.strerror})")
            self.forget(step)

    def abandon_after(self, step: int) -> None:
        """Sets the steps after this step aside."""
        for later in self.committed():
            if later > step:
                name = step_dirs.put_aside(self._dir(later), "abandoned").name
                self.forget(later)
                self._note(f"the checkpoint of step {later} is rolled back: renamed to {name}")

    def newest_in_words(self) -> str:
        """Returns a sentence for an error: which checkpoint is the newest; verifies none."""
        if steps := self.committed():
            return f"The newest checkpoint is of step {steps[-1]}, in {self.directory}."
        return f"There is no other checkpoint in {self.directory}."

    def metrics(self) -> Metrics:
        """Returns the metrics of each committed step."""
        later = self._evaluated()
        return {
            step: {**later.get(step, {}), **self.manifest(step).get("metrics", {})}
            for step in self.committed()
        }

    def _removes(self, path: Path) -> bool:
        """Removes a folder that was set aside; returns False, and says why, if that fails."""
        try:
            step_dirs.remove_leftover(path)
        except OSError as error:
            self._note(f"{path} cannot be removed ({error.strerror}): remove it by hand")
        return not path.exists()

    def _first_whole(self, listed: Callable[[], list[int]]) -> int | None:
        """Returns the first whole step; the list is made anew after each that is damaged."""
        while steps := listed():
            if not (wrong := self._wrong(steps[0])):
                return steps[0]
            # Deleted meanwhile by the job that trains there: it is not listed again.
            if self._dir(steps[0]).exists():
                self._refuse(steps[0], wrong)
        return None

    def _wrong(self, step: int) -> list[str]:
        if step in self._verified:
            return []
        if not (wrong := step_files.verify(self._dir(step))):
            self._verified.add(step)
        return wrong

    def _refuse(self, step: int, wrong: Sequence[str]) -> None:
        self.forget(step)
        if self._owned:
            done = f"renamed to {step_dirs.put_aside(self._dir(step), 'damaged').name}"
        else:
            self._skipped.add(step)
            done = "skipped"
        reasons = few(wrong, separator="; ")
        self._note(f"the checkpoint of step {step} is damaged ({reasons}): {done}")

    def _dir(self, step: int) -> Path:
        return self.directory / str(step)
