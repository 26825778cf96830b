"""Launches of a job on clocks that pass only when told."""

from praxis_lite.job.events import SAVE, STEP, JobEvents
from praxis_tools.goodput.timeline import Timeline


class Clocks:
    """Unix seconds, and seconds since the machine was started; both pass together."""

    def __init__(self):
        self.unix_seconds, self.seconds = 1_700_000_000.0, 500.0

    def now(self):
        return self.seconds

    def unix(self):
        return self.unix_seconds

    def passes(self, seconds):
        self.seconds += seconds
        self.unix_seconds += seconds


class FakeLaunch:
    """A launch that spends its time as it is told; at `from_step` it begins to train."""

    def __init__(self, path, clocks, notes=None, from_step=None):
        self.clocks = clocks
        self.events = JobEvents(now=clocks.now, unix=clocks.unix)
        self.notes = [] if notes is None else notes
        self.timeline = Timeline(path, self.events, self.notes.append)
        self.timeline.__enter__()
        if from_step is not None:
            self.timeline.report({"trains_from": from_step})

    def spends(self, kind, seconds):
        with self.events.phase(kind):
            self.clocks.passes(seconds)

    def steps(self, first, last, seconds):
        """Makes steps first to last, each of `seconds`."""
        for step in range(first, last + 1):
            self.spends(STEP, seconds)
            self.timeline.report({"made": step})

    def saves(self, step, seconds):
        with self.events.listening(self.timeline), self.events.phase(SAVE, step):
            self.clocks.passes(seconds)

    def killed(self, unseen=0.0):
        """Ends without a word; the last `unseen` seconds are in no file."""
        self.timeline._is_over.set()
        self.timeline._thread.join()
        self.timeline._is_over.clear()
        self.timeline._write()  # What the thread wrote last.
        self.clocks.passes(unseen)

    def ends(self, ended_by="the end"):
        self.timeline.ended_by = ended_by
        self.timeline.__exit__(None, None, None)
