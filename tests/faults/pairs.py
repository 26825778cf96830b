"""Kills one of two processes in a job at startup, during a step, or during a save."""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

from tests.faults.outcome import Outcome, Row, last_step, outcome_of, steps_of
from tests.faults.zoo import CHECKOUT, home, train_argv
from tests.support import process_pairs
from tests.support.job_runs import home as jobzoo

# Enough steps for the signal to arrive before the last step.
NUM_STEPS = 60
SETTINGS = (f"run.num_train_steps={NUM_STEPS}",)
# Maximum time for the other process to exit after a KILL.
END_SECONDS = 60


def run(say: Callable[[str], None] = print, *, phases=("start", "step", "save")) -> list[Row]:
    """Returns a row for each signal and phase. The signal is sent to each process in turn."""
    whole = home() / "pair_whole"
    done = _pair(whole)
    assert [item.code for item in done] == [0, 0], done
    rows = []
    for name in ("TERM", "KILL"):
        for phase in phases:
            row = Row(
                f"two processes, SIG{name} to one during a {phase}"
                if phase != "start"
                else f"two processes, SIG{name} to one at startup"
            )
            for victim in (0, 1):
                row.tried += 1
                actual = _case(row, name, phase, victim, outcome_of(whole))
                row.failures += [f"signal to process {victim}: {element}" for element in actual]
            say(f"  {row.line()}")
            rows.append(row)
    return rows


def _pair(job: Path) -> list[process_pairs.Ended]:
    return process_pairs.ended(_started(job))


def _started(job: Path):
    path = f"{CHECKOUT}:{jobzoo()}:{home()}"
    return process_pairs.start_processes(
        *train_argv(job, *SETTINGS), cwd=home(), env=[{"PYTHONPATH": path}] * 2
    )


def _case(row: Row, name: str, phase: str, victim: int, whole: Outcome) -> list[str]:
    """Returns a message for each failure."""
    job = home() / f"pair_{name}_{phase}_{victim}"
    processes = _started(job)
    process_pairs.wait_until(lambda: _has_come(job, phase), processes)
    sent = process_pairs.kill(processes[victim], getattr(signal, f"SIG{name}"))
    done = process_pairs.ended(processes)
    row.most("max. seconds until both have exited", round(max(item.at for item in done) - sent, 1))
    other = done[1 - victim]
    actual = []
    if name == "KILL":
        if other.code == 0 or other.at - sent > END_SECONDS:
            actual.append(f"the other process: status {other.code} after {other.at - sent:.0f} s")
        if f"process {victim}" not in other.out + other.err:
            actual.append(f"the other process does not name the killed process: {_short(other)}")
    else:
        codes = [element.code for element in done]
        # Before training starts, nothing is saved, and the status contains the signal.
        before = phase == "start" and codes == [128 + signal.SIGTERM] * 2
        if codes != [0, 0] and not before:
            actual += [_short(one) for one in done]
        lost = last_step(job) - max(steps_of(job), default=0)
        if lost:
            actual.append(f"{lost} steps lost")
    done = _pair(job)
    if [one.code for one in done] != [0, 0]:
        return [*actual, *(f"does not resume: {_short(one)}" for one in done)]
    actual += outcome_of(job).differences(whole)
    if not actual:
        shutil.rmtree(job)
    return actual


def _has_come(job: Path, phase: str) -> bool:
    if phase == "start":
        return (job / "config.json").exists()
    if phase == "step":
        return last_step(job) >= 10
    return last_step(job) >= 10 and any((job / "checkpoints").glob("*.saving*"))


def _short(ended: process_pairs.Ended) -> str:
    return f"status {ended.code}: {ended.out[-200:]} | {' '.join(ended.err.split())[-700:]}"
