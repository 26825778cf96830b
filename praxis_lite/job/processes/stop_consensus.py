"""Decisions that the processes of a job agree on at every step, through the devices."""

import logging
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from praxis_lite.job import processes
from praxis_lite.job.events import ON_DEVICES, events

_log = logging.getLogger(__name__)

# A host is slow when its work takes this many seconds, and this many times the median's, longer.
_SLOW_SECONDS, _SLOW_FACTOR = 0.05, 3.0
_SLOW_STEPS = 5  # In a row.
_REPEAT_SECONDS = 300.0


class StopConsensus:
    """Tells every process, at the same step, what any of them wants; names slow processes.

    The processes meet over a mesh.

    Attributes:
      stop_reason: the processes that wanted to stop when `reached` last returned True, as text.
      save_is_due: True if a checkpoint was due by the first process's clock, when `reached` was
        last called; the same on all processes.
      profile_steps: how many steps a process asked to profile, as the last call of `reached`
        knows; 0: none did.
      end_is_due: True if the first process had a reason to end training early, likewise.
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
        # One device of each process, by its place in the mesh's order.
        self._places = {d.process_index: place for place, d in reversed(list(enumerate(devices)))}
        self._gather = jax.jit(jnp.copy, out_shardings=NamedSharding(mesh, PartitionSpec()))
        self._split = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._pending: jax.Array | None = None
        self._own_seconds = 0.0
        self._slow = SlowHosts()

    def add_host_seconds(self, seconds: float) -> None:
        """Adds to what this process's own work, such as waiting for data, took in this step."""
        if not self._is_alone:
            self._own_seconds += seconds

    def saved(self) -> None:
        """Notes that a checkpoint was just begun, so an earlier request for one is void."""
        self.save_is_due, self._has_saved = False, True

    def should_stop(
        self, wanted: bool, save_is_due: bool = False, profile_steps: int = 0,
        end_is_due: bool = False,
    ) -> bool:
        """Returns True if any process wanted to stop, on all processes alike.

        With several processes the answer and the attributes are those of the call before: its step
        has ended when the metrics of that step are read, so nothing is waited for.

        Args:
          wanted, save_is_due: by this process's signals and clock.
          profile_steps: how many steps this process is asked to profile; 0: it is not.
          end_is_due: this process has a reason to end training early; the first one's counts.
        """
        self.profile_steps = 0
        if self._is_alone:
            self.save_is_due, self.profile_steps = save_is_due, profile_steps
            self.end_is_due = end_is_due
            return wanted
        row = np.array(
            [[wanted, self._own_seconds, save_is_due, profile_steps, end_is_due]], np.float32
        )
        self._own_seconds = 0.0
        whole = jax.make_array_from_callback(
            (self._mesh.size, row.shape[1]), self._split, lambda index: row
        )
        last, self._pending = self._pending, self._gather(whole)
        has_saved, self._has_saved = self._has_saved, False
        if last is None:
            return False
        with events.phase(ON_DEVICES):
            words = np.asarray(last)[[self._places[k] for k in sorted(self._places)]]
        if processes.is_first():
            self._slow.add(words[:, 1])
        # Gathered before a save that has come since, it would be made twice.
        self.save_is_due = bool(words[0, 2]) and not has_saved
        self.profile_steps = int(words[:, 3].max())
        self.end_is_due = bool(words[0, 4])
        asking = np.flatnonzero(words[:, 0]).tolist()
        if asking:
            self.stop_reason = f"a signal to {' and '.join(map(processes.name, asking))}"
        return bool(asking)


class SlowHosts:
    """Names processes whose own work takes far longer than the others', in the log."""

    def __init__(self) -> None:
        self._num_slow: dict[int, int] = {}
        self._said_at: dict[int, float] = {}

    def add(self, seconds: np.ndarray) -> None:
        """Takes the seconds of each process in a step."""
        # Of two processes the faster one, else a slow one would hide behind itself.
        usual = float(np.sort(seconds)[(len(seconds) - 1) // 2])
        for process, local in enumerate(seconds.tolist()):
            is_slow = local > max(_SLOW_FACTOR * usual, usual + _SLOW_SECONDS)
            self._num_slow[process] = self._num_slow.get(process, 0) + 1 if is_slow else 0
            now = time.monotonic()
            is_new = now - self._said_at.get(process, -_REPEAT_SECONDS) >= _REPEAT_SECONDS
            if self._num_slow[process] >= _SLOW_STEPS and is_new:
                self._said_at[process] = now
                _log.warning(
                    "slow: %s takes %.2f s a step for its own work, such as reading data, where "
                    "%.2f s is usual; all wait for it", processes.name(process), local, usual,
                )
