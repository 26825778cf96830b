"""The TensorBoard tracker: metrics, the config, and hyperparameters with the run's losses."""

import contextlib
import dataclasses
import time
from collections.abc import Mapping
from typing import Any

from praxis_lite.host.optional_packages import optional_module
from praxis_lite.trackers.tracker import Ending, Histogram, TrackedRun, Tracker


@dataclasses.dataclass
class TensorBoard(Tracker):
    """Writes summaries to JOB/tensorboard, for `tensorboard --logdir=JOB/tensorboard`.

    The files are written by tensorboardX, which does not need tensorflow. If tensorboardX (extra
    "plots") is not installed, a note is printed and no summaries are written.

    Attributes:
      every: See `Tracker.every`.
    """

    every: int | None = None

    def start(self, run: TrackedRun) -> None:
        """Opens an event file. Raises ConfigError if tensorboardX is not installed."""
        log_dir = run.job_log_dir / "tensorboard"
        # Do not use SummaryWriter, whose thread exits when the disk is full, after which calls
        # block.
        writer, self._event_pb2, self._summary = (
            optional_module(f"tensorboardX.{name}", f"{log_dir}, for TensorBoard,")
            for name in ("event_file_writer", "proto.event_pb2", "summary")
        )
        log_dir.mkdir(exist_ok=True)
        # Add nanoseconds to the file name. tensorboardX uses seconds, so a run that resumes within
        # a second would overwrite its previous file.
        self._events = writer.EventsWriter(str(log_dir / "events"), f".{time.time_ns()}")
        try:
            for title, values in (("config", run.config), ("facts", run.facts)):
                self.text(run.first_step, title, "\n".join(f"{k}={v}" for k, v in values.items()))
            losses = ["loss", *(f"{dataset}/loss" for dataset in run.evaluated)]
            for summary in self._summary.hparams(dict(run.config), dict.fromkeys(losses))[:2]:
                self._add(0, summary)
        except OSError:
            with contextlib.suppress(OSError):
                self._close()
            raise

    def resume_from(self, step: int) -> None:
        """Makes TensorBoard hide the events for steps after `step`."""
        start = self._event_pb2.SessionLog(status=self._event_pb2.SessionLog.START)
        self._write(self._event_pb2.Event(step=step + 1, session_log=start))

    def scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes a point for each number."""
        pb2 = self._summary
        values = [pb2.Summary.Value(tag=name, simple_value=x) for name, x in scalars.items()]
        self._add(step, pb2.Summary(value=values))

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Writes histograms, which TensorBoard shows in its Histograms and Distributions tabs."""
        pb2 = self._summary
        values = []
        for name, x in histograms.items():
            num = float(x.counts.sum())
            proto = pb2.HistogramProto(
                min=float(x.edges[0]),
                max=float(x.edges[-1]),
                num=num,
                sum=x.mean * num,
                sum_squares=(x.std**2 + x.mean**2) * num,
                # Each bucket has a right limit. An empty bucket limits the first bin on the left.
                bucket_limit=x.edges.tolist(),
                bucket=[0.0, *x.counts.tolist()],
            )
            values.append(pb2.Summary.Value(tag=name, histo=proto))
        self._add(step, pb2.Summary(value=values))

    def text(self, step: int, name: str, text: str) -> None:
        """Writes text that is displayed verbatim."""
        markdown = "".join(f"    {line}\n" for line in text.splitlines())
        self._add(step, self._summary.text(name, markdown))

    def image(self, step: int, name: str, png: bytes) -> None:
        """Writes an image."""
        width, height = (int.from_bytes(png[at : at + 4], "big") for at in (16, 20))
        pb2 = self._summary
        image = pb2.Summary.Image(
            height=height, width=width, colorspace=4, encoded_image_string=png
        )
        self._add(step, pb2.Summary(value=[pb2.Summary.Value(tag=name, image=image)]))

    def end(self, ending: Ending) -> None:
        """Closes the file."""
        self._close()

    def _close(self) -> None:
        try:
            self._events.flush()
        finally:
            # EventsWriter.close() leaves the file open if a flush fails, for example because the
            # disk is full.
            self._events._py_recordio_writer.close()

    def _add(self, step: int, summary: Any) -> None:
        self._write(self._event_pb2.Event(step=step, summary=summary))

    def _write(self, event: Any) -> None:
        event.wall_time = time.time()
        self._events.write_event(event)
        self._events.flush()
