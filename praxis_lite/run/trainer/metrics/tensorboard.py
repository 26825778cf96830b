"""TensorBoard event files through tensorboardX, which needs no tensorflow."""

import contextlib
import os
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from praxis_lite.core.errors import ConfigError
from praxis_lite.host.optional_packages import optional_module


class TensorBoardWriter(contextlib.AbstractContextManager):
    """Writes scalars that `tensorboard --logdir` shows.

    These are pictures of what metrics.jsonl has: a missing tensorboardX or a full disk ends them,
    with a note, but not the run. TensorBoard hides what earlier files have of steps after
    `resume_step` (None: it hides nothing).

    The events are tensorboardX's, written and flushed here: its SummaryWriter hands each scalar to
    a thread through a multiprocessing queue, which took 1 ms of a step with eight scalars.
    """

    def __init__(self, log_dir: str | os.PathLike[str], resume_step: int | None = None,
                 note: Callable[[str], None] = print):
        self._log_dir, self._note, self._is_closed = pathlib.Path(log_dir), note, False
        try:
            event_file_writer, event_pb2, summary_pb2 = (
                optional_module(f"tensorboardX.{name}", f"{self._log_dir}, for TensorBoard,")
                for name in ("event_file_writer", "proto.event_pb2", "proto.summary_pb2")
            )
        except ConfigError as error:
            self._is_closed = True
            note(f"note: {error}")
            return
        self._event_pb2, self._summary_pb2 = event_pb2, summary_pb2
        try:
            self._log_dir.mkdir(parents=True, exist_ok=True)
            # The file's name differs by the second: a run that resumes at once would overwrite.
            self._events = event_file_writer.EventsWriter(
                str(self._log_dir / "events"), f".{time.time_ns()}")
        except OSError as error:
            self._give_up(error)
        if resume_step is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(event_pb2.Event(step=resume_step + 1, session_log=start))

    def scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Writes a point per scalar, at `step`."""
        if self._is_closed:
            return
        values = [self._summary_pb2.Summary.Value(tag=name, simple_value=float(value))
                  for name, value in scalars.items()]
        summary = self._summary_pb2.Summary(value=values)
        self._write(self._event_pb2.Event(step=int(step), summary=summary))

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            with contextlib.suppress(OSError):  # Each event was flushed.
                self._events.close()

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _write(self, event: Any) -> None:
        if self._is_closed:
            return
        event.wall_time = time.time()
        try:
            self._events.write_event(event)
            self._events.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._is_closed = True
        # tensorboardX's own close() flushes once more, fails, and leaves the file open.
        with contextlib.suppress(OSError, AttributeError):
            self._events._py_recordio_writer.close()
        self._note(f"note: no more is written for TensorBoard: {self._log_dir}: {error.strerror}")
