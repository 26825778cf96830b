"""The kinds of a job's seconds."""

IMPORT = "import"  # From the start of the process: Python, libraries, the experiment's config.
INIT = "init"  # All else around training: the mesh, tracing, checks, a new state, the loss curve.
COMPILE = "compile"  # Programs of the job, wherever they are compiled.
RESTORE = "restore"  # Verifying and reading the job's checkpoint, at the start or in a roll-back.
INPUT_WAIT = "input wait"  # The loop waits for a batch.
STEP = "step"  # The rest of the loop over steps: the devices compute, metrics are written, hooks.
LOST_STEP = "lost step"  # Steps that were made, not saved, and made again later.
EVALUATION = "evaluation"
SAVE = "save"  # Training waits for a save; not what goes on in the background.
HANDS = "change of hands"  # Of an elastic job: another process is gone, leaves or comes; agreed.
IDLE = "idle"  # Between launches, and from the last sign of life of a launch that was killed.

# A launch tells these apart while it runs; the others are seen once there is a next launch.
OF_LAUNCH = (IMPORT, INIT, COMPILE, RESTORE, INPUT_WAIT, STEP, EVALUATION, SAVE)
KINDS = (
    IMPORT, INIT, COMPILE, RESTORE, INPUT_WAIT, STEP, LOST_STEP, EVALUATION, SAVE, HANDS,
    IDLE,
)
