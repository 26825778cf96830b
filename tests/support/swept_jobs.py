"""A job that trains within a second, for tests of sweeps: `jobzoo.swept.Swept`."""

from tests.support import line_jobs
from tests.support.job_runs import home

EXPERIMENTS = '''
import os
import time

import fiddle as fdl

from jobzoo.lines import Line, Lines
from praxis_lite import EvaluationSettings, RunConfig, SaveSettings, register


class SlowLines(Lines):
    """Points that come slowly, if the environment says so."""

    def rows(self, index, rows):
        time.sleep(float(os.environ.get("SWEPT_SECONDS", "0")))
        return super().rows(index, rows)


@register
class Swept(Line):
    """A line with a loss on other points."""

    PRESET = "plain"

    def datasets(self):
        train = fdl.Config(SlowLines, batch_size=13)
        return {"train": train, "heldout": fdl.Config(Lines, batch_size=13)}

    def run(self):
        return fdl.Config(
            RunConfig, num_train_steps=20,
            checkpoints=fdl.Config(SaveSettings, every_steps=5),
            evaluation=fdl.Config(EvaluationSettings, every_steps=5, max_batches=2),
        )
'''
SWEPT = "--exp=jobzoo.swept.Swept"
assert line_jobs.LINE  # jobzoo.lines, which the experiment imports, must exist.
(home() / "jobzoo/swept.py").write_text(EXPERIMENTS)
