"""Kills jobs repeatedly with KILL and TERM at chosen points.

A chain is a job that is killed up to ten times, in each launch at a different point, and then runs
to the end. Its results must be bitwise equal to those of an undisturbed job.
"""

import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from praxis_lite.checkpoints.steps.step_store import DiskSteps
from tests.faults.damage import files_of, flip_bit
from tests.faults.kill_points import CURVE, END, STEP, Kill, plan
from tests.faults.outcome import (
    Outcome,
    Row,
    last_step,
    outcome_of,
    restored_step,
    steps_of,
    tail,
    temporary_files,
)
from tests.faults.zoo import SAVE_EVERY, home, train_argv
from tests.faults.zygote import Launch, Zygote

KILLS_PER_CHAIN = 10
# Maximum time to exit after TERM.
TERM_SECONDS = 30


def run(
    zygote: Zygote,
    whole: Outcome,
    num_kills: int,
    seed: int,
    say: Callable[[str], None] = print,
    settings: tuple[str, ...] = (),
) -> list[Row]:
    """Returns a row for each signal and phase, and a row for the chains.

    Args:
      zygote: Process that launches jobs.
      whole: Outcome of an undisturbed job with the same settings.
      num_kills: Total number of kills.
      seed: Seed of the plan.
      say: Function that prints a line of progress.
      settings: Settings of the job, as for --set.
    """
    rows: dict[tuple[str, str], Row] = {}
    chains = Row("chains of kills: final metrics, evaluations and digests are bitwise equal")
    groups, done, unreached = plan(num_kills, seed), 0, 0
    while groups and done < num_kills:
        chain = _Chain(zygote, home() / f"chain{chains.tried}", rows, settings)
        # From here on, every launch reaches its point.
        chain.makes([Kill("KILL", STEP, {"at": "step", "nth": 4 * SAVE_EVERY})])
        while groups and chain.goes_on and chain.num_kills < KILLS_PER_CHAIN:
            if chain.makes(groups[0]) or chain.failures:
                groups.pop(0)
            elif chain.num_kills == 1:
                unreached += 1
                say(f"  never reached: {groups.pop(0)}")
        if chain.goes_on and chains.tried % 2:
            chain.makes([Kill("KILL", END, CURVE[chains.tried // 2 % 2])])
        chains.tried += 1
        failures = chain.failures or chain.ended(whole)
        if failures:
            chains.failures.append(f"{chain.told()}: {'; '.join(failures)}")
        else:
            shutil.rmtree(chain.job)
        done += chain.num_kills
        say(
            f"  {done} of {num_kills} kills, {chains.tried} chains"
            + (f", FAILED: {failures[0][:300]}" if failures else "")
        )
    if unreached:
        chains.figures["points never reached"] = unreached
    return [*(rows[key] for key in sorted(rows)), chains]


class _Chain:
    """A job that is killed repeatedly.

    Attributes:
      job: Job directory.
      num_kills: Number of kills so far.
      failures: Failure messages. The chain ends after the first failure.
    """

    def __init__(
        self, zygote: Zygote, job: Path, rows: Mapping[tuple[str, str], Row], settings: tuple
    ):
        self.job, self.failures = job, []
        self._zygote, self._rows, self._settings = zygote, rows, settings
        self._history: list[Kill] = []
        self._since_restore: list[Kill] = []
        self._reached = 0
        self._is_finished = False

    @property
    def num_kills(self) -> int:
        return len(self._history)

    @property
    def goes_on(self) -> bool:
        return not self.failures and not self._is_finished

    def told(self) -> str:
        """Returns the job's name and its kills."""
        kills = ", ".join(f"{kill.name} {dict(kill.point)}" for kill in self._history)
        return f"{self.job.name} ({kills})"

    def makes(self, group: list[Kill]) -> bool:
        """Launches the job for each kill. Returns False if the job ends before the first kill."""
        for index, kill in enumerate(group):
            if not self._makes(kill):
                return index > 0
        return True

    def _makes(self, kill: Kill) -> bool:
        point = dict(kill.point)
        if point.pop("damaged", False):
            _damage_newest(self.job)
        lines = self._metrics()
        launch = self._launch(kill.name, point)
        if launch.code == 0 and re.search(r"trained to step|already completed its", launch.out):
            self._is_finished = True
            return False
        failures = self._lost(launch, lines, kill)
        if kill.name == "KILL" and launch.code != -signal.SIGKILL:
            failures.append(tail(launch))
        if not any("damaged" in item.point for item in (*self._history, kill)):
            failures += _broken_steps(self.job)
        row = self._rows.setdefault((kill.name, kill.phase), Row(f"SIG{kill.name} {kill.phase}"))
        if kill.name == "TERM":
            row.most("max. seconds until exit", round(launch.seconds, 1))
            failures += _unlike_a_stop(launch)
        row.tried += 1
        row.failures += failures
        self.failures += failures
        self._history.append(kill)
        self._since_restore.append(kill)
        return not failures

    def _metrics(self) -> bytes:
        path = self.job / "metrics.jsonl"
        return path.read_bytes() if path.exists() else b""

    def _lost(self, launch: Launch, lines_before: bytes, kill: Kill | None) -> list[str]:
        """Returns a message if a launch that restored a step lost too many steps.

        Args:
          launch: The launch.
          lines_before: Content of metrics.jsonl before the launch.
          kill: Kill of this launch. Its cost is measured in the next launch, except for damage,
            which affects this launch.
        """
        restored = restored_step(launch)
        if restored is None:
            return []
        lost, kills = self._reached - restored, self._since_restore
        most = 2 * SAVE_EVERY if any(item.name == "KILL" for item in kills) else 0
        # Damage costs the newest step, for either signal.
        is_damaged = any("damaged" in one.point for one in (*kills, *([kill] if kill else [])))
        most += SAVE_EVERY * is_damaged
        if len(kills) == 1 and not is_damaged:
            self._rows[kills[0].name, kills[0].phase].most("max. steps lost", lost)
        self._since_restore = []
        # A launch that was killed before its first step leaves metrics.jsonl unchanged.
        self._reached = restored if self._metrics() == lines_before else last_step(self.job)
        if lost <= most:
            return []
        told = ", ".join(f"{element.name} {element.phase}" for element in kills)
        return [f"{lost} steps lost to {told}: {restored} of {restored + lost} steps were restored"]

    def _launch(self, name: str, point: dict[str, Any]) -> Launch:
        argv = train_argv(self.job, *self._settings)
        number = getattr(signal, f"SIG{name}")
        if "seconds" in point:
            return self._zygote.launch(
                argv, meanwhile=lambda pid, out: _send(pid, number, out, self.job, point)
            )
        return self._zygote.launch(argv, [{**point, "do": name}])

    def ended(self, whole: Outcome) -> list[str]:
        """Runs the job to the end. Returns messages about its differences from `whole`."""
        if not self._is_finished:
            launch = self._zygote.launch(train_argv(self.job, *self._settings))
            if launch.code != 0:
                return [f"did not complete: {tail(launch)}"]
            self.failures += self._lost(launch, b"", None)
        left = temporary_files(self.job)
        if not any("damaged" in kill.point for kill in self._history):
            # A kill never damages a step, because incomplete folders have no plain number as name.
            left += sorted(path.name for path in self.job.glob("checkpoints/*.damaged*"))
        actual = [f"left behind: {', '.join(left)}"] if left else []
        return self.failures + outcome_of(self.job).differences(whole) + actual


def _broken_steps(job: Path) -> list[str]:
    """Returns a message for each damaged step. Folders with a plain number must be complete."""
    steps = DiskSteps(job / "checkpoints")
    return [
        f"{step} is damaged: {wrong[0]}"
        for step in steps_of(job)
        if (wrong := steps.verify(str(step)))
    ]


def _unlike_a_stop(launch: Launch) -> list[str]:
    """Returns a message if a launch did not handle TERM correctly."""
    saved = "stopped by SIGTERM" in launch.out
    told = saved or "SIGTERM" in launch.err
    # Before Python installs its handlers, the signal terminates the process.
    if launch.code not in (0, 128 + signal.SIGTERM, -signal.SIGTERM) or "Traceback" in launch.err:
        return [tail(launch)]
    if launch.code >= 0 and not told:
        return [f"exited without a message: {tail(launch)}"]
    if re.search(r"^step ", launch.out, flags=re.M) and (launch.code or not saved):
        return [f"ended during training without a save: {tail(launch)}"]
    if launch.seconds > TERM_SECONDS:
        return [f"took {launch.seconds:.0f} s"]
    return []


def _send(pid: int, number: int, out: Path, job: Path, point: Mapping[str, Any]) -> None:
    """Sends a signal some seconds after a line was printed or a folder appeared."""
    until = time.monotonic() + 60
    while time.monotonic() < until and Path(f"/proc/{pid}").exists():
        if "after" in point and point["after"] in out.read_text(errors="replace"):
            break
        if "when" in point and any((job / "checkpoints").glob(point["when"])):
            break
        time.sleep(0.002)
    time.sleep(point["seconds"])
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _damage_newest(job: Path) -> None:
    """Flips a bit in the newest step if there is another step to resume from."""
    if len(steps := steps_of(job)) > 1:
        flip_bit(files_of(job / "checkpoints" / str(steps[-1]))[0], 0)
