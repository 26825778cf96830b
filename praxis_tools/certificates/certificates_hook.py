"""When a job that trains is certified, and what follows a difference (run.certify_every_steps)."""

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from praxis_lite.core.errors import ConfigError, OutOfMemory
from praxis_lite.core.partitioner.train_state import TrainState
from praxis_lite.inputs.base import TRAIN
from praxis_lite.job import processes
from praxis_lite.job.events import COMPILE, events
from praxis_lite.trainer.hooks.hook import Hook, StepMade
from praxis_lite.trainer.hooks.loop import Loop
from praxis_lite.trainer.job_on_mesh import JobOnMesh, partitioner_on
from praxis_lite.trainer.metrics.json_lines import append_lines
from praxis_tools.certificates.certifier import CertifiedStep, Certifier, differ_anywhere
from praxis_tools.certificates.diagnosis import (
    Difference,
    Search,
    as_json,
    of_copies,
    of_restored,
)
from praxis_tools.certificates.state_digests import StateDigests
from praxis_tools.check.certificate import Comparison


class NotCertified(ConfigError):
    """A certificate found a difference. The state is saved; hosts of an elastic job end, too."""


class NotRestored(ConfigError):
    """A state is not the saved state. An elastic job reads it once more."""

    exit_status = 4


class Certificates(Hook):
    """Makes a step again every so many steps, and compares all copies of the state.

    Digests of the state are saved with each checkpoint, and compared when it is restored, on any
    mesh.
    """

    def __init__(self, job: JobOnMesh):
        self._job, self.every = job, job.run.certify_every_steps
        partitioner = job.partitioner
        self._layout, self._mesh = partitioner.layout, partitioner.mesh
        self._digests_of = StateDigests(self._layout, self._mesh)
        self._certifier: Certifier | None = None
        self._saved: Mapping[str, Any] | None = None
        self._step, self._has_room, self._waited = 0, False, 0.0
        self._error: str | None = None

    # At the start.

    def restore(self, saved: Any) -> None:
        self._saved = saved

    def before_training(self, loop: Loop, state: TrainState) -> None:
        self._loop = loop
        with events.phase(COMPILE):
            self._digests_of.compile()
        began = time.perf_counter()
        self._digests, self._step = self._digests_of(state), loop.first_step
        # What was saved without a certificate has the digests of an earlier step.
        if self._saved and self._saved["step"] == loop.first_step:
            found = self._agreed([
                *of_copies(self._layout, self._mesh, self._digests),
                *of_restored(self._layout, self._mesh, self._saved, self._digests),
            ])
            self._record(loop.first_step, began, found, number=2 * len(self._digests.by_leaf))
            if found:
                # The state that was read is not the one that was saved: do not save it again.
                raise NotRestored(
                    f"The state of step {loop.first_step} is not the one that was saved. "
                    f"{found[0]}. Nothing was trained. Launch again, and the checkpoint is read "
                    "anew; if it is the same device again, take that out."
                )
        self._prepare(state)
        if self._is_kept(loop.first_step):
            self._certifier.keep(state, loop.first_step)

    def _prepare(self, state: TrainState) -> None:
        job = self._job
        spec = job.datasets[TRAIN].element_spec()
        with events.phase(COMPILE):
            try:
                self._certifier = Certifier(
                    job.partitioner, lambda mesh: partitioner_on(job.job, mesh), spec,
                    job.run.seed, state,
                )
            except ConfigError as error:
                self._warn_of_no_reruns(error)

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        yield
        if self._certifier is not None:
            self._certifier.compile_in_thread()

    # Between steps.

    def _is_kept(self, step: int) -> bool:
        """Returns True if the update after a step is recomputed, from the state of the step."""
        return self._certifier is not None and (step + 1) % self.every == 0

    def is_due(self, step: int, is_last: bool) -> bool:
        return self._is_kept(step) or self._is_certified_or_saved(step, is_last)

    def _is_certified_or_saved(self, step: int, is_last: bool) -> bool:
        # What is saved has digests: `Saves` asks the same.
        loop, run = self._loop, self._job.run
        every = (self.every, run.checkpoints.every_steps, run.peer_save_every_steps)
        return (
            is_last or any(number is not None and step % number == 0 for number in every)
            or loop.consensus.save_is_due or loop.checkpoints.retry_is_due()
        )

    def after_step(self, made: StepMade) -> str | None:
        reason = None
        if self._is_certified_or_saved(made.step, made.is_last):
            reason = self._certify(made)
        if self._is_kept(made.step) and not made.is_last:
            self._certifier.keep(made.state, made.step)
        return reason

    def _certify(self, made: StepMade) -> str | None:
        began, loop = time.perf_counter(), self._loop
        with loop.watchdog.during(f"certifying step {made.step}"):
            self._digests, self._step = self._digests_of(made.state), made.step
            found = self._agreed(of_copies(self._layout, self._mesh, self._digests))
            if made.step % self.every and not found:
                return None
            certified = None if found else self._certified(made)
            if certified is not None and differ_anywhere(certified.comparisons):
                loop.note(f"step {made.step} is not certified; looking for the cause")
                found = self._agreed([Search(self._certifier, certified).difference()])
            self._record(made.step, began + self._waited, found, certified)
            self._waited = 0.0
        if not found:
            return None
        return self._act(made.step, found[0])

    def _certified(self, made: StepMade) -> CertifiedStep | None:
        if self._certifier is None:
            return None
        if not self._has_room:
            self._has_room, began = True, time.perf_counter()
            try:
                with events.phase(COMPILE):
                    self._certifier.check_memory()
            except OutOfMemory as error:
                self._warn_of_no_reruns(error)
                self._certifier.close()
                self._certifier = None
                return None
            self._waited = time.perf_counter() - began
        result = self._certifier.certify(made.state, made.batch, made.key, made.step)
        for note in self._certifier.new_notes():
            self._loop.note(f"note: {note}")
        return result

    def _warn_of_no_reruns(self, error: ConfigError) -> None:
        self._loop.note(
            f"WARNING: no step can be made again for run.certify_every_steps: {error} Copies of "
            "the state are compared all the same."
        )

    def _agreed(self, found: Sequence[Difference]) -> list[Difference]:
        """Returns the difference of the first process that found any, on all processes."""
        own = json.dumps(as_json(found[0])) if found else ""
        texts = processes.exchange("certificate", own)
        first = next(filter(None, texts), "")
        return [Difference(**json.loads(first))] if first else []

    def _act(self, step: int, difference: Difference) -> str | None:
        self._loop.note(f"WARNING: step {step} is NOT CERTIFIED: {difference}")
        if self._job.run.certify_action == "report":
            # Keep the state for inspection.
            self._loop.consensus.save_is_due = True
            return None
        self._error = f"Step {step} is not certified. {difference}."
        return "a certificate found a difference"

    # What is kept.

    def to_save(self) -> Mapping[str, Any]:
        return {"step": self._step, **self._digests.to_save()}

    def _record(
        self, step: int, began: float, found: Sequence[Difference],
        certified: CertifiedStep | None = None, number: int | None = None,
    ) -> None:
        if not self._loop.is_first:
            return
        comparisons: Sequence[Comparison] = [] if certified is None else certified.comparisons
        closest = max(comparisons, key=lambda x: x.share, default=None)
        append_lines(self._job.files.certificates_jsonl, [{
            "step": step, "time": time.time(),
            "rows": 0 if certified is None else self._certifier.num_rows,
            "meshes": self._meshes(certified),
            "certified": not found,
            "num_comparisons": len(comparisons) + (number or len(self._digests.by_leaf)),
            "closest": None if closest is None else {
                "leaf": closest.leaf, "share": closest.share, "mesh": closest.mesh,
            },
            "update": None if certified is None or certified.update is None else {
                "arrays": certified.update.num_arrays, "of_arrays": certified.update.of_arrays,
                "bits": certified.update.is_exact,
            },
            "repeated": certified is not None and certified.draw > 0,
            "seconds": time.perf_counter() - began,
            "state_digest": self._digests.of_state,
            "difference": as_json(found[0] if found else None),
        }])

    def _meshes(self, certified: CertifiedStep | None) -> dict[str, Any]:
        meshes: dict[str, Any] = {"own": dict(self._mesh.shape)}
        if certified is not None:
            meshes["moved"] = {"order": self._certifier.order, "exact": self._certifier.is_exact}
            for other in self._certifier.reruns[2:]:
                meshes["other"] = dict(other.mesh.shape)
        return meshes

    # At the end.

    def after_training(self, step: int) -> None:
        if self._error is not None:
            with self._loop.watchdog.during("saving"):
                self._loop.checkpoints.wait()
            raise NotCertified(
                f"{self._error} The state is saved, and training has ended. See "
                f"{self._job.files.certificates_jsonl}. Take the device out, or mend the program "
                "(--mode=check says more); run.certify_action=report goes on in spite of it."
            )

    def __exit__(self, *exc_info: object) -> None:
        if self._certifier is not None:
            self._certifier.close()
