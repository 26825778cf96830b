"""TensorBoard's event files, through tensorboardX, which needs no tensorflow."""

import contextlib
import os
import pathlib
import time
from collections.abc import Mapping
from typing import Any

from praxis_lite.host.optional_packages import optional_module


class TensorBoardWriter(contextlib.AbstractContextManager):
    """Writes an event file that `tensorboard --logdir` shows.

    The events are tensorboardX's, written and flushed here: its SummaryWriter hands each scalar to
    a thread through a multiprocessing queue, which took 1 ms of a step with eight scalars.

    Raises ConfigError if tensorboardX is missing, and OSError if the disk is full.
    """

    def __init__(self, log_dir: str | os.PathLike[str], resume_step: int | None = None):
        log_dir = pathlib.Path(log_dir)
        event_file_writer, self._event_pb2, self._summary = (
            optional_module(f"tensorboardX.{name}", f"{log_dir}, for TensorBoard,")
            for name in ("event_file_writer", "proto.event_pb2", "summary")
        )
        log_dir.mkdir(parents=True, exist_ok=True)
        # The file's name differs by the second: a run that resumes at once would overwrite.
        self._events = event_file_writer.EventsWriter(
            str(log_dir / "events"), f".{time.time_ns()}"
        )
        if resume_step is not None:
            self.go_on_from(resume_step)

    def go_on_from(self, step: int) -> None:
        """Lets TensorBoard hide the events of later steps."""
        start = self._event_pb2.SessionLog(status=self._event_pb2.SessionLog.START)
        self._write(self._event_pb2.Event(step=step + 1, session_log=start))

    def scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Writes a point per scalar, at `step`."""
        pb2 = self._summary
        values = [
            pb2.Summary.Value(tag=name, simple_value=float(value))
            for name, value in scalars.items()
        ]
        self._add(step, pb2.Summary(value=values))

    def text(self, step: int, name: str, text: str) -> None:
        """Writes a text in Markdown."""
        self._add(step, self._summary.text(name, text))

    def image(self, step: int, name: str, png: bytes) -> None:
        """Writes a picture."""
        width, height = (int.from_bytes(png[at : at + 4], "big") for at in (16, 20))
        pb2 = self._summary
        image = pb2.Summary.Image(
            height=height, width=width, colorspace=4, encoded_image_string=png
        )
        self._add(step, pb2.Summary(value=[pb2.Summary.Value(tag=name, image=image)]))

    def hparams(self, values: Mapping[str, Any], metrics: Mapping[str, Any]) -> None:
        """Writes settings as hyperparameters, beside the named metrics."""
        for summary in self._summary.hparams(dict(values), dict(metrics))[:2]:
            self._add(0, summary)

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        with contextlib.suppress(OSError, ValueError):  # Each event was flushed.
            self._events.close()
        self._close_file()

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _add(self, step: int, summary: Any) -> None:
        self._write(self._event_pb2.Event(step=int(step), summary=summary))

    def _write(self, event: Any) -> None:
        event.wall_time = time.time()
        try:
            self._events.write_event(event)
            self._events.flush()
        except OSError:
            self._close_file()
            raise

    def _close_file(self) -> None:
        # tensorboardX's own close() flushes first, and leaves the file open if that fails.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            self._events._py_recordio_writer.close()
