"""The hook that certifies steps of a running job and handles differences.

Enabled by `run.certify_every_steps`.
"""

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from praxis_lite.core.errors import ConfigError, Error, NotCertified, OutOfMemory
from praxis_lite.core.partitioner.train_state import TrainState
from praxis_lite.inputs.base import TRAIN
from praxis_lite.job import processes
from praxis_lite.job.events import COMPILE, events
from praxis_lite.job.processes.logs import warn_once_per_job
from praxis_lite.trainer.hooks.hook import DispatchedStep, Hook
from praxis_lite.trainer.hooks.loop_state import LoopState
from praxis_lite.trainer.job_on_mesh import JobOnMesh, partitioner_on
from praxis_lite.trainer.metrics.json_lines import append_lines
from praxis_tools.certificates.certifier import CertifiedStep, Certifier
from praxis_tools.certificates.diagnosis import (
    CauseSearch,
    Difference,
    as_json,
    replica_differences,
    restored_state_differences,
)
from praxis_tools.certificates.rerun import any_process_differs
from praxis_tools.certificates.state_digests import StateDigests
from praxis_tools.check.certificate import Comparison


class NotRestored(Error):
    """Raised if a restored state differs from the saved state.

    Elastic jobs then restore the state again.
    """

    exit_status = 4


class Certificates(Hook):
    """Certifies a step every `run.certify_every_steps` steps, and compares replicas of the state.

    Digests of the state are saved with each checkpoint and are compared when the checkpoint is
    restored, even on a different mesh.
    """

    def __init__(self, job: JobOnMesh):
        interval = job.run.certify_every_steps
        assert interval is not None
        self._job, self._interval, self.every = job, interval, interval
        partitioner = job.partitioner
        self._layout, self._mesh = partitioner.layout, partitioner.mesh
        self._compute_digests = StateDigests(self._layout, self._mesh)
        self._certifier: Certifier | None = None
        self._saved: Mapping[str, Any] | None = None
        self._step, self._is_memory_checked, self._compile_wait_seconds = 0, False, 0.0
        self._error: str | None = None

    # Start of training.

    def restore(self, saved: Any) -> None:
        self._saved = saved

    def before_training(self, loop: LoopState, state: TrainState) -> None:
        self._loop = loop
        with events.phase(COMPILE):
            self._compute_digests.compile()
        began = time.perf_counter()
        self._digests, self._step = self._compute_digests(state), loop.first_step
        # A checkpoint whose step was not certified contains the digests from an earlier step.
        if self._saved and self._saved["step"] == loop.first_step:
            differences = self._agree_on_first(
                [
                    *replica_differences(self._layout, self._mesh, self._digests),
                    *restored_state_differences(
                        self._layout, self._mesh, self._saved, self._digests
                    ),
                ]
            )
            self._record(
                loop.first_step,
                began,
                differences,
                num_digests=2 * len(self._digests.by_leaf),
            )
            if differences:
                # Raise an error before the wrong state can be saved.
                raise NotRestored(
                    f"The restored state of step {loop.first_step} differs from the saved state. "
                    f"{differences[0]}. No step was trained. Relaunch the job to read the "
                    "checkpoint again. If the same device differs again, remove it from the job."
                )
        self._create_certifier(state)
        self._take_snapshot_if_due(state, loop.first_step)

    def _create_certifier(self, state: TrainState) -> None:
        job = self._job
        spec, *other_shapes = job.datasets[TRAIN].element_specs()
        with events.phase(COMPILE):
            try:
                if other_shapes:
                    raise ConfigError(
                        f"The batches of datasets.{TRAIN} have {1 + len(other_shapes)} shapes; "
                        "expected one. Set bucket_lengths=()."
                    )
                self._certifier = Certifier(
                    job.partitioner,
                    lambda mesh: partitioner_on(job.job, mesh),
                    spec,
                    job.run.seed,
                    state,
                )
            except (ConfigError, OutOfMemory) as error:
                self._warn_without_reruns(error)

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        yield
        if self._certifier is not None:
            self._certifier.compile_in_thread()

    # Between steps.

    def _needs_snapshot_after(self, step: int) -> bool:
        """Returns whether the state after `step` is needed to recompute the next step's update."""
        return self._certifier is not None and (step + 1) % self._interval == 0

    def _take_snapshot_if_due(self, state: TrainState, step: int) -> None:
        if self._certifier is not None and self._needs_snapshot_after(step):
            self._certifier.take_snapshot(state, step)

    def is_due(self, step: int, is_last: bool) -> bool:
        return self._needs_snapshot_after(step) or self._is_certified_or_saved(step, is_last)

    def _is_certified_or_saved(self, step: int, is_last: bool) -> bool:
        # Keep this in sync with `Saves`: digests are computed for every step that is saved.
        loop, run = self._loop, self._job.run
        intervals = (self._interval, run.checkpoints.every_steps, run.peer_save_every_steps)
        return (
            is_last
            or any(every is not None and step % every == 0 for every in intervals)
            or loop.consensus.save_is_due
            or loop.checkpoints.retry_is_due()
        )

    def after_step(self, dispatched: DispatchedStep) -> str | None:
        reason = None
        if self._is_certified_or_saved(dispatched.step, dispatched.is_last):
            reason = self._certify(dispatched)
        if not dispatched.is_last:
            self._take_snapshot_if_due(dispatched.state, dispatched.step)
        return reason

    def _certify(self, dispatched: DispatchedStep) -> str | None:
        """Compares replicas, and re-runs the step if it is due to be certified.

        Returns:
          The reason to stop training, or None to continue.
        """
        began, loop = time.perf_counter(), self._loop
        with loop.watchdog.during(f"certifying step {dispatched.step}"):
            self._digests, self._step = self._compute_digests(dispatched.state), dispatched.step
            differences = self._agree_on_first(
                replica_differences(self._layout, self._mesh, self._digests)
            )
            # Most steps only compare the replicas of the state. A step that is due is also re-run.
            if dispatched.step % self._interval and not differences:
                return None
            certified = None if differences else self._rerun_step(dispatched)
            certifier = self._certifier
            if (
                certifier is not None
                and certified is not None
                and any_process_differs(certified.comparisons)
            ):
                loop.note(f"step {dispatched.step} is not certified; looking for the cause")
                difference = CauseSearch(certifier, certified).find()
                differences = self._agree_on_first([difference])
            # Compilation does not count as time spent on the certificate.
            began += self._compile_wait_seconds
            self._record(dispatched.step, began, differences, certified)
            self._compile_wait_seconds = 0.0
        if not differences:
            return None
        return self._handle_difference(dispatched.step, differences[0])

    def _rerun_step(self, dispatched: DispatchedStep) -> CertifiedStep | None:
        if self._certifier is None:
            return None
        if not self._is_memory_checked:
            self._is_memory_checked, began = True, time.perf_counter()
            try:
                with events.phase(COMPILE):
                    self._certifier.check_memory()
            except OutOfMemory as error:
                self._warn_without_reruns(error)
                self._certifier.close()
                self._certifier = None
                return None
            self._compile_wait_seconds = time.perf_counter() - began
        certified = self._certifier.certify(
            dispatched.state, dispatched.batch, dispatched.key, dispatched.step
        )
        for note in self._certifier.new_notes():
            self._loop.note(f"note: {note}")
        return certified

    def _warn_without_reruns(self, error: Error) -> None:
        warn_once_per_job(
            f"run.certify_every_steps cannot re-run steps: {error} Only replicas of the state are "
            "compared."
        )

    def _agree_on_first(self, differences: Sequence[Difference]) -> list[Difference]:
        """Returns the first difference found by any process, as a list of at most one element."""
        local = json.dumps(as_json(differences[0])) if differences else ""
        texts = processes.exchange("certificate", local)
        first = next(filter(None, texts), "")
        return [Difference(**json.loads(first))] if first else []

    def _handle_difference(self, step: int, difference: Difference) -> str | None:
        warn_once_per_job(f"step {step} is NOT CERTIFIED: {difference}")
        if self._job.run.certify_action == "report":
            # Save the state for inspection.
            self._loop.consensus.save_is_due = True
            return None
        self._error = f"Step {step} is not certified. {difference}."
        return "a certificate found a difference"

    # Records.

    def to_save(self) -> Mapping[str, Any]:
        return {"step": self._step, **self._digests.to_save()}

    def _record(
        self,
        step: int,
        began: float,
        differences: Sequence[Difference],
        certified: CertifiedStep | None = None,
        num_digests: int | None = None,
    ) -> None:
        """Appends a line to certificates.jsonl, only in the first process."""
        if not self._loop.is_first:
            return
        certifier = self._certifier
        comparisons: Sequence[Comparison] = [] if certified is None else certified.comparisons
        closest = max(comparisons, key=lambda x: x.share, default=None)
        append_lines(
            self._job.files.certificates_jsonl,
            [
                {
                    "step": step,
                    "time": time.time(),
                    "rows": 0 if certified is None or certifier is None else certifier.num_rows,
                    "meshes": self._meshes(certified),
                    "certified": not differences,
                    "num_comparisons": len(comparisons)
                    + (num_digests or len(self._digests.by_leaf)),
                    "closest": None
                    if closest is None
                    else {
                        "leaf": closest.leaf,
                        "share": closest.share,
                        "mesh": closest.mesh,
                    },
                    "update": None
                    if certified is None or certified.update is None
                    else {
                        "arrays": certified.update.num_arrays,
                        "of_arrays": certified.update.of_arrays,
                        "bits": certified.update.is_exact,
                    },
                    "repeated": certified is not None and certified.draw > 0,
                    "seconds": time.perf_counter() - began,
                    "state_digest": self._digests.of_state,
                    "difference": as_json(differences[0] if differences else None),
                }
            ],
        )

    def _meshes(self, certified: CertifiedStep | None) -> dict[str, Any]:
        meshes: dict[str, Any] = {"own": dict(self._mesh.shape)}
        certifier = self._certifier
        if certified is not None and certifier is not None:
            meshes["moved"] = {"order": certifier.order, "exact": certifier.is_exact}
            for rerun in certifier.reruns[2:]:
                meshes["other"] = dict(rerun.mesh.shape)
        return meshes

    # End of training.

    def after_training(self, step: int) -> None:
        if self._error is not None:
            with self._loop.watchdog.during("saving"):
                self._loop.checkpoints.wait()
            file = self._job.files.shown(self._job.files.certificates_jsonl)
            raise NotCertified(
                f"{self._error} The state is saved, and training has ended. See {file}. Remove the "
                "faulty device, or fix the model code (`praxis check` shows details). To continue "
                "despite differences, set run.certify_action=report."
            )

    def __exit__(self, *exc_info: object) -> None:
        if self._certifier is not None:
            self._certifier.close()
