"""Verifies the steps of a directory before they are used, and sets damaged steps aside.

A step is verified once per process, on first use. Listing steps does not verify them. The job that
owns the directory sets damaged steps aside. A process that only reads leaves damaged steps in
place, because a job may be training in the directory.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from praxis_lite.checkpoints.steps.manifest import committed_manifest
from praxis_lite.checkpoints.steps.retention import BestCheckpoints
from praxis_lite.checkpoints.steps.step_store import LEFTOVERS, steps_in
from praxis_lite.core.errors import ConfigError, Error, StepLost, first_few
from praxis_lite.host.object_stores import AnyPath

Step = int | Literal["best"] | None  # None is the newest step.
Metrics = Mapping[int, Mapping[str, float]]


class VerifiedSteps:
    """The steps of a directory, verified before use.

    Args:
      directory: The folder of all steps.
      owned: Whether this job owns the directory and may set aside and delete steps.
      note: Called with a message about each damaged step and how it is handled.
      evaluated: Function that returns metrics keyed by step, from evaluations run after the save.
        Metrics that were saved with a step take precedence.

    Attributes:
      store: The steps in the directory, without verification.
    """

    def __init__(
        self,
        directory: AnyPath,
        *,
        owned: bool,
        note: Callable[[str], None],
        evaluated: Callable[[], Metrics] = dict,
    ):
        self.directory, self.store = directory, steps_in(directory)
        self._owned, self._note = owned, note
        self._evaluated = evaluated
        self._verified: set[int] = set()
        self._skipped: set[int] = set()
        self._manifests: dict[int, Mapping[str, Any]] = {}

    def repair(self) -> None:
        """Cleans up after killed saves and deletions, and completes interrupted renames."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for name in self.store.folders_of_kind(*LEFTOVERS):
            number = name.removesuffix(".saving")
            if number.isdecimal() and self.store.is_committed(name) and not self.store.verify(name):
                self.store.publish(int(number))
                self._note(f"completed the save of step {number}: its last rename was missing")
            elif self._remove_leftover(name):
                action = "deletion" if ".deleting" in name else "save"
                self._note(f"removed {name}, left by an interrupted {action}")
        for step in self.store.uncommitted():
            self._reject(step, self.store.verify(str(step)))

    def committed(self) -> list[int]:
        """Returns the committed steps in order, except steps that were found to be damaged."""
        return [step for step in self.store.committed() if step not in self._skipped]

    def newest(self) -> int | None:
        """Verifies and returns the newest undamaged step, or None if no step was saved.

        Raises:
          ConfigError: All steps are damaged.
        """

        def candidates() -> list[int]:
            return [step for step in reversed(self.store.numbered()) if step not in self._skipped]

        step = self._first_undamaged(candidates)
        if step is None:
            damaged = [str(step) for step in self.store.numbered() if step in self._skipped]
            damaged += self.store.folders_of_kind("damaged")
            if damaged:
                raise ConfigError(
                    f"No checkpoint in {self.directory} can be used: {', '.join(damaged)} "
                    f"{'is' if len(damaged) == 1 else 'are'} damaged. Restore an undamaged copy, "
                    "or, to start over, remove the damaged steps or choose a different directory."
                )
        return step

    def best(self, ranking: BestCheckpoints | None) -> int | None:
        """Verifies and returns the best undamaged step, or None if no step has the metric.

        Args:
          ranking: The metric and mode. If None, the metric and mode saved with the newest step are
            used.
        """
        if ranking is None:
            newest = self.newest()
            recorded = None if newest is None else self.manifest(newest)["best"]
            if recorded is None:
                return None
            ranking = BestCheckpoints(**recorded)
        return self._first_undamaged(lambda: ranking.ranked(self.metrics()))

    def choose(self, step: Step, best: BestCheckpoints | None) -> int:
        """Verifies a step and returns its number.

        Args:
          step: A number, "best", or None for the newest.
          best: The ranking for "best".

        Raises:
          StepLost: The step does not exist or is damaged.
          ConfigError: There are no steps, or all steps are damaged.
        """
        number = self.newest() if step is None else self.best(best) if step == "best" else step
        errors = [] if number is None else self._errors(number)
        if number is not None and not errors:
            return number
        steps = self.committed()
        if not steps:
            raise ConfigError(
                f"There is no checkpoint in {self.directory}. Train the job first "
                "(`praxis train`), or use the directory of a trained job."
            )
        if number not in steps:
            missing = f"no checkpoint of step {step}"
            if step == "best":
                missing = "no best checkpoint (none was saved with the metric)"
            raise StepLost(
                f"There is {missing} in {self.directory}; it has the steps "
                f"{', '.join(map(str, steps))}. Choose one of them, or omit the step for the "
                "newest."
            )
        others = ", ".join(str(other) for other in steps if other != number)
        advice = f"Choose a different step: {others}." if others else "There is no other step."
        if self._owned:
            self._reject(number, errors)
        raise StepLost(
            f"The checkpoint of step {number} in {self.directory} is damaged: "
            f"{first_few(errors, separator='; ')}. {advice}"
        )

    def manifest(self, step: int) -> Mapping[str, Any]:
        """Returns the manifest of a step. Raises StepLost if the step was deleted."""
        if step not in self._manifests:
            manifest, errors = committed_manifest(self.directory / str(step))
            if errors:
                raise self._deleted(step)
            self._manifests[step] = manifest
        return self._manifests[step]

    @contextlib.contextmanager
    def read(self, step: int) -> Iterator[Mapping[str, Any]]:
        """Context manager for reading the files of a step.

        Yields:
          The step's manifest.

        Raises:
          StepLost: The job that trains in the directory deleted the step. Raised on entry if the
            step was already deleted, and on exit if it was deleted while it was being read.
        """
        manifest, identity = self.manifest(step), self.store.identity(step)
        if identity is None:
            raise self._deleted(step)
        try:
            yield manifest
        except Error as error:
            if self.store.identity(step) != identity:
                raise self._deleted(step) from error
            raise
        # A deletion starts by renaming the folder or deleting its commit, which changes `identity`.
        if self.store.identity(step) != identity:
            raise self._deleted(step)

    def forget(self, step: int) -> None:
        """Drops cached information about a step that was deleted or saved again."""
        self._verified.discard(step)
        self._skipped.discard(step)
        self._manifests.pop(step, None)

    def delete(self, steps: Collection[int]) -> None:
        """Deletes the given steps, and all abandoned steps."""
        for name in self.store.folders_of_kind("abandoned"):
            self._remove_leftover(name)
        for step in steps:
            try:
                self.store.remove(step)
            except OSError as error:
                self._note(f"the checkpoint of step {step} cannot be deleted ({error.strerror})")
            self.forget(step)

    def abandon_after(self, step: int) -> None:
        """Sets aside all steps after `step`."""
        for later in self.committed():
            if later > step:
                action = self.store.abandon(later)
                self.forget(later)
                self._note(f"the checkpoint of step {later} is rolled back: {action}")

    def describe_newest(self) -> str:
        """Describes the newest checkpoint for error messages, without verifying it."""
        if steps := self.committed():
            return f"The newest checkpoint is of step {steps[-1]}, in {self.directory}."
        return f"There is no other checkpoint in {self.directory}."

    def metrics(self) -> Metrics:
        """Returns the metrics of each committed step."""
        later, steps = self._evaluated(), self.committed()

        def metrics(step: int) -> Mapping[str, float]:
            with contextlib.suppress(StepLost):
                return {**later.get(step, {}), **self.manifest(step)["metrics"]}
            return later.get(step, {})

        with ThreadPoolExecutor() as pool:
            return dict(zip(steps, pool.map(metrics, steps), strict=True))

    def _remove_leftover(self, name: str) -> bool:
        """Removes a folder that was set aside. On failure, prints a note and returns False."""
        path = self.directory / name
        try:
            self.store.remove_leftover(name)
        except OSError as error:
            self._note(f"{path} cannot be removed ({error.strerror}): remove it by hand")
        return not path.exists()

    def _first_undamaged(self, candidates: Callable[[], list[int]]) -> int | None:
        """Returns the first undamaged step. Calls `candidates` again after each damaged step."""
        while steps := candidates():
            if not (errors := self._errors(steps[0])):
                return steps[0]
            # If the job that trains there has deleted the step, `candidates` no longer returns it.
            if (self.directory / str(steps[0])).exists():
                self._reject(steps[0], errors)
        return None

    def _errors(self, step: int) -> list[str]:
        """Verifies a step once, and returns a line for each error."""
        if step in self._verified:
            return []
        manifest, errors = self.store.verified_manifest(str(step))
        if not errors:
            self._verified.add(step)
            self._manifests[step] = manifest
        return errors

    def _deleted(self, step: int) -> StepLost:
        self.forget(step)
        return StepLost(
            f"The checkpoint of step {step} was deleted while it was being read, by the job that "
            f"trains in {self.directory}. Try again."
        )

    def _reject(self, step: int, errors: Sequence[str]) -> None:
        """Sets aside or skips a damaged step, and prints a note."""
        self.forget(step)
        if self._owned:
            action = self.store.quarantine(step)
        else:
            self._skipped.add(step)
            action = "skipped"
        reasons = first_few(errors, separator="; ")
        self._note(f"the checkpoint of step {step} is damaged ({reasons}): {action}")
