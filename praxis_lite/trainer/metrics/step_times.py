"""Names and definitions of a step's times in metrics.jsonl.

All times are in seconds, measured in the process that writes the file. `trainer/training_loop.py`
measures all of them except device_time.

- step_time: from the end of the previous step to the end of this step. A step ends when the loop
  reads its metrics. Excludes compilation, evaluations, saves, and hooks that wait.
- input_time: time that the loop waited for the step's batch.
- dispatch_time: duration of the call to the compiled step.
- device_time: duration of the step on the devices (`DeviceClock`).
- evaluation_time, save_time: duration of the evaluation and the save between the previous step and
  this step, or 0 if there was none. A step's line is written before the step is evaluated and
  saved, so times after the last step are only in timeline.jsonl.

On known chips, mfu and hfu are fractions of the peak performance; see
praxis_tools/utilization/utilization_hook.py.
"""

__all__ = ("HFU", "MFU", "STEP_TIME")

STEP_TIME, INPUT_TIME, DISPATCH_TIME = "step_time", "input_time", "dispatch_time"
DEVICE_TIME, EVALUATION_TIME, SAVE_TIME = "device_time", "evaluation_time", "save_time"
TIMES = (STEP_TIME, INPUT_TIME, DISPATCH_TIME, DEVICE_TIME, EVALUATION_TIME, SAVE_TIME)
MFU, HFU = "mfu", "hfu"
