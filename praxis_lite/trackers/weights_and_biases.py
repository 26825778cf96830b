"""The Weights & Biases tracker, online or offline according to W&B's environment variables."""

import dataclasses
import html
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from praxis_lite.host.optional_packages import optional_module
from praxis_lite.trackers.tracker import Ending, Histogram, TrackedRun, Tracker

# Timeout for starting and finishing a run. By default, W&B waits for 90 s at the start and without
# a limit at the end, so the process would exit late.
_TIMEOUT_SECONDS = 20


@dataclasses.dataclass
class WeightsAndBiases(Tracker):
    """Records all launches of a job as a single run in Weights & Biases.

    `WANDB_API_KEY`, `WANDB_BASE_URL`, `WANDB_MODE=offline` and similar variables apply as usual
    (https://docs.wandb.ai). Offline runs are stored in JOB/wandb, with one folder per launch, for
    `wandb sync`. Numbers are plotted against the metric "step".

    Attributes:
      project: W&B project of the run. If None, W&B's environment variables or defaults.
      entity: W&B entity of the run. If None, W&B's environment variables or defaults.
      tags: Tags of the run.
      every: See `Tracker.every`.
    """

    needed_package = "wandb"

    project: str | None = None
    entity: str | None = None
    tags: Sequence[str] = ()
    every: int | None = None

    def start(self, run: TrackedRun) -> None:
        """Starts the run, or continues the run of an earlier launch."""
        self._wandb = optional_module("wandb", "WeightsAndBiases")
        settings = self._wandb.Settings(
            # Do not redirect the job's output or delay the exit of the process.
            console="off",
            silent=True,
            disable_git=True,
            save_code=False,
            init_timeout=_TIMEOUT_SECONDS,
            finish_timeout=_TIMEOUT_SECONDS,
            # Interval for writing points to disk. Points that are not on disk are lost if the
            # process is killed. The default is 15 s.
            x_transaction_log_flush_interval=1.0,
        )
        self._run = self._wandb.init(
            id=run.id,
            resume="allow",
            name=run.name,
            dir=str(run.job_log_dir),
            project=self.project,
            entity=self.entity,
            tags=list(self.tags) or None,
            job_type="train",
            settings=settings,
        )
        facts = {f"facts.{name}": value for name, value in run.facts.items()}
        self._run.config.update({**run.config, **facts}, allow_val_change=True)
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        if not self._run.offline:
            run.note(f"Weights & Biases: {self._run.url}")

    def scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Records numbers with their step."""
        self._run.log({"step": step, **scalars})

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Records the histograms."""
        values = {
            name: self._wandb.Histogram(np_histogram=(x.counts.tolist(), x.edges.tolist()))
            for name, x in histograms.items()
        }
        self._run.log({"step": step, **values})

    def text(self, step: int, name: str, text: str) -> None:
        """Records text as an HTML page."""
        self._run.log({"step": step, name: self._wandb.Html(f"<pre>{html.escape(text)}</pre>")})

    def image(self, step: int, name: str, png: bytes) -> None:
        """Records an image."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, f"{name}.png")
            path.write_bytes(png)
            self._run.log({"step": step, name: self._wandb.Image(str(path))})

    def end(self, ending: Ending) -> None:
        """Finishes the W&B run, marking it as failed after an exception."""
        self._run.finish(exit_code=int(ending == "failed"))
