"""The kinds of a job's seconds: those of a launch, and those that a later launch reveals."""

from praxis_lite.run.events import (
    COMPILE,
    EVALUATION,
    IMPORT,
    INIT,
    INPUT_WAIT,
    RESTORE,
    SAVE,
    STEP,
)

LOST_STEP = "lost step"  # Steps that were made, not saved, and made again later.
HANDS = "change of hands"  # Of an elastic job: another process is gone, leaves or comes; agreed.
IDLE = "idle"  # Between launches, and from the last sign of life of a launch that was killed.

KINDS = (
    IMPORT, INIT, COMPILE, RESTORE, INPUT_WAIT, STEP, LOST_STEP, EVALUATION, SAVE, HANDS,
    IDLE,
)
