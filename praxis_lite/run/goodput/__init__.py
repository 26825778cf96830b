"""Where did the time of a job go? Each second, in its launches and between them, has a kind.

Knows clocks and a file in the job's directory, and never sees an array or a step.
"""

from praxis_lite.run.goodput.goodput import Goodput, Launch, goodput_of

__all__ = ["Goodput", "Launch", "goodput_of"]
