"""TensorBoard event files through tensorboardX, which needs no tensorflow."""

import os
import pathlib
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self


class TensorBoardWriter:
    """Writes scalars, texts and images that `tensorboard --logdir` shows.

    tensorboardX's events, written and flushed here: its SummaryWriter hands each scalar to a thread
    through a multiprocessing queue, which took 1 ms of a step with eight scalars.
    """

    def __init__(self, log_dir: str | os.PathLike[str], resume_step: int | None = None):
        """Opens a new event file in `log_dir`.

        Args:
            log_dir: the directory; a writer of the same run may have left files there.
            resume_step: TensorBoard hides what earlier files hold of later steps. None: hides
                nothing.
        """
        from tensorboardX import event_file_writer, summary
        from tensorboardX.proto import event_pb2, summary_pb2

        self._event_pb2, self._summary_pb2, self._summary = event_pb2, summary_pb2, summary
        log_dir = pathlib.Path(log_dir)
        log_dir.mkdir(parents=True, exist_ok=True)
        # The file's name differs by the second: a run that resumes at once would overwrite.
        self._events = event_file_writer.EventsWriter(str(log_dir / "events"), f".{time.time_ns()}")
        self._is_closed = False
        if resume_step is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(event_pb2.Event(step=resume_step + 1, session_log=start))

    def scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Writes one point per scalar, at `step`."""
        values = [self._summary_pb2.Summary.Value(tag=name, simple_value=float(value))
                  for name, value in scalars.items()]
        self._write_summary(step, self._summary_pb2.Summary(value=values))

    def text(self, step: int, name: str, text: str) -> None:
        """Writes a Markdown text, a sample of decoded output for instance."""
        self._write_summary(step, self._summary.text(name, text))

    def image(self, step: int, name: str, png_path: str | os.PathLike[str]) -> None:
        """Writes the image in a PNG file."""
        from matplotlib import image

        pixels = image.imread(png_path)
        self._write_summary(step, self._summary.image(name, pixels, dataformats="HWC"))

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self.close()

    def _write_summary(self, step: int, summary: Any) -> None:
        self._write(self._event_pb2.Event(step=int(step), summary=summary))

    def _write(self, event: Any) -> None:
        event.wall_time = time.time()
        self._events.write_event(event)
        self._events.flush()
