"""The signal that asks a host to leave an elastic job."""

from praxis_lite.run.job.processes import signals


class Leaves(signals.SignalListener):
    """Hears a signal that asks this host to leave the job."""

    def __init__(self) -> None:
        super().__init__()
        self.reason = ""

    def _asked(self, signum: int) -> None:
        self.reason = signals.name(signum)
        signals.say(f"{self.reason}: this process leaves the job after the running step; a second "
                    "signal ends it at once")
