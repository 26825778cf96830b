"""Makes all processes of a job stop, save and profile at the same step."""

import logging
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from praxis_lite.job import processes
from praxis_lite.job.events import ON_DEVICES, events

_log = logging.getLogger(__name__)

# A process is slow if its host time per step exceeds the median by this number of seconds and by
# this factor.
_SLOW_SECONDS, _SLOW_FACTOR = 0.05, 3.0
_SLOW_STEPS = 5  # Consecutive slow steps before a warning.
_REPEAT_SECONDS = 300.0


class StopConsensus:
    """Combines the requests of all processes, so that they all act at the same step.

    Each call of `should_stop` dispatches a small gather over the mesh and returns the result of the
    previous call's gather, so no process waits. A warning is logged for processes whose host work
    is slow.

    Args:
      mesh: The job's mesh.

    Attributes:
      stop_reason: Once `should_stop` has returned True, a message that lists the processes that
        requested the stop.
      save_is_due: Whether a checkpoint was due by the first process's clock. `should_stop` updates
        this and the following attributes, which are the same in all processes.
      profile_steps: Number of steps that a process requested to profile, or 0 without a request.
      end_is_due: Whether the first process had a reason to end training early.
    """

    def __init__(self, mesh: Mesh):
        self.stop_reason, self.save_is_due, self.profile_steps = "this process", False, 0
        self.end_is_due = False
        self._has_saved = False
        self._is_alone = jax.process_count() == 1
        if self._is_alone:
            return
        self._mesh = mesh
        devices = list(mesh.devices.flat)
        # For each process, the index in the mesh of one of its devices.
        self._device_indices = {
            device.process_index: index for index, device in reversed(list(enumerate(devices)))
        }
        self._gather = jax.jit(jnp.copy, out_shardings=NamedSharding(mesh, PartitionSpec()))
        self._row_sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._pending: jax.Array | None = None
        self._host_seconds = 0.0
        self._slow = SlowHosts()

    def add_host_seconds(self, seconds: float) -> None:
        """Adds time that this process's host spent on the current step, such as reading input."""
        if not self._is_alone:
            self._host_seconds += seconds

    def saved(self) -> None:
        """Clears a pending request for a checkpoint, because a save was just started."""
        self.save_is_due, self._has_saved = False, True

    def should_stop(
        self,
        stop_requested: bool,
        save_is_due: bool = False,
        profile_steps: int = 0,
        end_is_due: bool = False,
    ) -> bool:
        """Combines the requests of all processes.

        If there are several processes, the result and the attributes are based on the requests in
        the previous call. The gather of these requests is already complete, because the loop has
        read the metrics of the preceding step.

        Args:
          stop_requested: Whether this process was requested to stop.
          save_is_due: Whether a checkpoint is due by this process's clock.
          profile_steps: Number of steps that this process was requested to profile, or 0.
          end_is_due: Whether this process has a reason to end training early.

        Returns:
          Whether any process was requested to stop; the same in all processes.
        """
        self.profile_steps = 0
        if self._is_alone:
            self.save_is_due, self.profile_steps = save_is_due, profile_steps
            self.end_is_due = end_is_due
            return stop_requested
        row = np.array(
            [[stop_requested, self._host_seconds, save_is_due, profile_steps, end_is_due]],
            np.float32,
        )
        self._host_seconds = 0.0
        # Each device stores the row of its process. The gather replicates all rows.
        rows = jax.make_array_from_callback(
            (self._mesh.size, row.shape[1]), self._row_sharding, lambda index: row
        )
        previous, self._pending = self._pending, self._gather(rows)
        has_saved, self._has_saved = self._has_saved, False
        if previous is None:
            return False
        with events.phase(ON_DEVICES):
            # The devices of a process have equal rows. Read one row for each process.
            requests = np.asarray(previous)[
                [self._device_indices[k] for k in sorted(self._device_indices)]
            ]
        if processes.is_first():
            self._slow.add(requests[:, 1])
        # Ignore a request if a save has started since the request was made.
        self.save_is_due = bool(requests[0, 2]) and not has_saved
        self.profile_steps = int(requests[:, 3].max())
        self.end_is_due = bool(requests[0, 4])
        stopping = np.flatnonzero(requests[:, 0]).tolist()
        if stopping:
            self.stop_reason = f"a signal to {' and '.join(map(processes.name, stopping))}"
        return bool(stopping)


class SlowHosts:
    """Logs a warning about processes whose host work is much slower than that of others."""

    def __init__(self) -> None:
        self._num_slow: dict[int, int] = {}
        self._warned_at: dict[int, float] = {}

    def add(self, seconds: np.ndarray) -> None:
        """Adds each process's host seconds for a step."""
        # Use the lower median. With two processes, the mean would hide that one of them is slow.
        median = float(np.sort(seconds)[(len(seconds) - 1) // 2])
        for process, process_seconds in enumerate(seconds.tolist()):
            is_slow = process_seconds > max(_SLOW_FACTOR * median, median + _SLOW_SECONDS)
            self._num_slow[process] = self._num_slow.get(process, 0) + 1 if is_slow else 0
            now = time.monotonic()
            is_due = now - self._warned_at.get(process, -_REPEAT_SECONDS) >= _REPEAT_SECONDS
            if self._num_slow[process] >= _SLOW_STEPS and is_due:
                self._warned_at[process] = now
                _log.warning(
                    "slow: %s takes %.2f s per step for host work, such as reading data; the "
                    "median is %.2f s, and all processes wait for it",
                    processes.name(process),
                    process_seconds,
                    median,
                )
