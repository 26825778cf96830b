"""TensorBoard event files through tensorboardX, which needs no tensorflow."""

import contextlib
import os
import pathlib
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self


class TensorBoardWriter:
    """Writes scalars, texts and images that `tensorboard --logdir` shows.

    These are pictures of what metrics.jsonl has: a full disk ends them, with a note, and no run.

    tensorboardX's events, written and flushed here: its SummaryWriter hands each scalar to a thread
    through a multiprocessing queue, which took 1 ms of a step with eight scalars.
    """

    def __init__(self, log_dir: str | os.PathLike[str], resume_step: int | None = None,
                 note: Callable[[str], None] = print):
        """Opens a new event file in `log_dir`.

        Args:
            log_dir: the directory; a writer of the same run may have left files there.
            resume_step: TensorBoard hides what earlier files hold of later steps. None: hides
                nothing.
            note: told, once, why no more is written.
        """
        from tensorboardX import event_file_writer, summary
        from tensorboardX.proto import event_pb2, summary_pb2

        self._event_pb2, self._summary_pb2, self._summary = event_pb2, summary_pb2, summary
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
            with contextlib.suppress(OSError):  # Each event was flushed.
                self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self.close()

    def _write_summary(self, step: int, summary: Any) -> None:
        self._write(self._event_pb2.Event(step=int(step), summary=summary))

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
