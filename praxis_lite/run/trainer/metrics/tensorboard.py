"""TensorBoard event files through tensorboardX, which needs no tensorflow."""

import contextlib
import os
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any


class TensorBoardWriter(contextlib.AbstractContextManager):
    """Writes scalars that `tensorboard --logdir` shows.

    These are pictures of what metrics.jsonl has: a full disk ends them, with a note, but not the
    run. TensorBoard hides what earlier files have of steps after `resume_step` (None: it hides
    nothing).

    The events are tensorboardX's, written and flushed here: its SummaryWriter hands each scalar to
    a thread through a multiprocessing queue, which took 1 ms of a step with eight scalars.
    """

    def __init__(self, log_dir: str | os.PathLike[str], resume_step: int | None = None,
                 note: Callable[[str], None] = print):
        from tensorboardX import event_file_writer
        from tensorboardX.proto import event_pb2, summary_pb2

        self._event_pb2, self._summary_pb2 = event_pb2, summary_pb2
        self._log_dir, self._note, self._is_closed = pathlib.Path(log_dir), note, False
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
