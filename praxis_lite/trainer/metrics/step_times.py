"""How the times of a step are measured: columns of metrics.jsonl, in seconds of its writer.

`trainer/step_metrics.py` measures all but device_time.

- step_time: from the end of the step before to the end of this one, as the loop sees them; without
  compiling, evaluations and saves, and without hooks that wait.
- input_time: the loop waited for the step's batch.
- dispatch_time: the call of the compiled step.
- device_time: the step on the devices (`DeviceClock`).
- evaluation_time, save_time: the loop evaluated and saved between the step before and this one; 0
  if it did not. Those after the last step are in timeline.jsonl alone. (The line of a step is on
  disk before its evaluation and its save begin.)

Where the chip is known, mfu and hfu are shares of its peak:
praxis_tools/utilization/utilization_hook.py.
"""

__all__ = ("HFU", "MFU", "STEP_TIME")

STEP_TIME, INPUT_TIME, DISPATCH_TIME = "step_time", "input_time", "dispatch_time"
DEVICE_TIME, EVALUATION_TIME, SAVE_TIME = "device_time", "evaluation_time", "save_time"
TIMES = (STEP_TIME, INPUT_TIME, DISPATCH_TIME, DEVICE_TIME, EVALUATION_TIME, SAVE_TIME)
MFU, HFU = "mfu", "hfu"
