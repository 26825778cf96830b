"""Writes the config, layout and loss curve of a launch to the job directory."""

import logging

from praxis_lite.config.config_json import (
    config_difference,
    config_lines,
    dump_config,
    load_config_file,
)
from praxis_lite.core.errors import ConfigError
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.experiment.launched_config import LaunchedConfig
from praxis_lite.experiment.recorded_job import copy_tokenizers
from praxis_lite.host.atomic_files import write_atomically
from praxis_lite.job import processes
from praxis_lite.job.job_dir import JobDir
from praxis_lite.job.processes.logs import warn_once_per_job
from praxis_lite.trainer.layout_table import (
    layout_json,
    layout_table,
    layout_warnings,
    optimizer_report,
    padding_notes,
)
from praxis_lite.trainer.metrics.loss_curve import plot_loss_curve


class ConfigFiles:
    """Writes the config of a launch as config.json and config.txt.

    Args:
      launched: The config of the launch.
      files: The job's directory.

    Attributes:
      json: Content of config.json.
    """

    def __init__(self, launched: LaunchedConfig, files: JobDir):
        self._launched, self._files = launched, files
        self.json = dump_config(
            launched.config, launched.experiment, launched.settings, packages=launched.packages
        )
        self._lines = config_lines(launched.config)

    def write_if_new(self) -> None:
        """Writes config.json and config.txt unless they exist.

        This is called before any other file is written, so that the job can be resumed if the
        launch is killed later.
        """
        if not self._files.config_json.is_file():
            self._files.write_config(self.json, self._lines)

    def write(self) -> None:
        """Writes config.json and config.txt, and copies the tokenizers used in the config."""
        self._files.write_config(self.json, self._lines)
        if processes.is_first():
            copy_tokenizers(self._launched.config, self._files)

    def changes(self) -> list[str]:
        """Returns a line for each setting that changed since the previous launch."""
        previous = load_config_file(self._files.config_json, packages=self._launched.packages)
        return config_difference(previous.config, self._launched.config)


def write_layout(partitioner: Partitioner, files: JobDir) -> None:
    """Writes layout.json and layout.txt, and logs a summary, notes and warnings."""
    layout, table = partitioner.layout, layout_table(partitioner.layout)
    write_atomically(files.layout_json, layout_json(layout).encode())
    write_atomically(files.layout_txt, "\n".join([table, *layout.notes, ""]).encode())
    for line in optimizer_report(partitioner.bound_learner.groups):
        _log.info(line)
    _log.info("%s See layout.txt.", table.splitlines()[-1])
    for note in (*layout.notes, *padding_notes(layout)):
        _log.info("note: %s", note)
    for warning in layout_warnings(layout):
        warn_once_per_job(warning)


def draw_loss_curve(files: JobDir, step: int) -> None:
    """Writes loss_curve.png, or logs why it cannot be written."""
    if not processes.is_first():
        return
    try:
        plot_loss_curve(files, f"{files.path.name}, {step} steps")
    except ConfigError as error:
        _log.info("note: %s", error)


_log = logging.getLogger(__name__)
