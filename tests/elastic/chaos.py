"""Compares an elastic job whose hosts fail at random with an undisturbed run.

    python -m tests.elastic.chaos --dir=DIR --events=100 --members=4 --devices=2

DIR contains both jobs, the logs of all hosts, a line per event (events.jsonl) and the result of the
comparison (verdict.json). The same command resumes an interrupted run. The exit status is 1 if any
check failed.
"""

import argparse
import dataclasses
import json
import os
import platform
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.elastic import verdict
from tests.elastic.events import Events, Happened
from tests.elastic.hosts import CHECKOUT, Host, Hosts, Settings, wait_for
from tests.elastic.report import events_row, report_lines, seconds_by_part
from tests.faults.outcome import Row, last_step

SURVIVE_SECONDS = 300.0
PAUSE_SECONDS = 0.1  # Pause in each step, so that events occur both within and between steps.
PEER_STEPS, DISK_STEPS = 5, 20
MOST_STEPS = 1_000_000
_STEPS_TO_THE_END = 20


def settings_of(
    folder: Path,
    members: int,
    devices: int,
    least: int = 1,
    *more: str,
    disk_steps: int = DISK_STEPS,
) -> Settings:
    """Returns the settings of the job in DIR/job, which trains until it is asked to stop."""
    return Settings(
        job=folder / "job",
        num_hosts=members,
        num_devices=devices,
        cache=folder / "cache",
        least=least,
        settings=(
            f"NUM_DEVICES={members * devices}",
            f"hooks[0].seconds={PAUSE_SECONDS}",
            f"run.checkpoints.every_steps={disk_steps}",
            f"run.num_train_steps={MOST_STEPS}",
            f"run.peer_save_every_steps={PEER_STEPS}",
            *more,
        ),
    )


class Chaos:
    """Triggers random events one after another.

    Args:
      hosts: The hosts of the job.
      folder: Folder of the job and of the record of events.
      seed: Seed for the kinds, hosts and times of events.
    """

    def __init__(self, hosts: Hosts, folder: Path, seed: int):
        self.hosts, self._record = hosts, folder / "events.jsonl"
        self.done = [json.loads(line) for line in _lines(self._record)]
        self._rng = random.Random(f"{seed} {len(self.done)}")
        self.events = Events(hosts, self._rng)

    def begin(self) -> None:
        """Starts all hosts and waits for their first step."""
        for host in self.hosts.hosts:
            host.start()
        if not self._steps_after(self.hosts.generation()["number"], self.events.present):
            raise SystemExit(f"the job does not start: {self._said()}")

    def run(self, num_events: int) -> None:
        """Triggers events until there are `num_events`, including those of previous launches."""
        while len(self.done) < num_events:
            time.sleep(self._rng.uniform(0.5, 5.0))
            losses, returns = self.events.losses(), self.events.returns()
            kinds = returns if returns and self._rng.random() < 0.5 else losses
            ((_, act),) = self._rng.choices(
                list(kinds.values()), [weight for weight, _ in kinds.values()]
            )
            self.happens(act)

    def happens(self, act: Callable[[], Happened]) -> bool:
        """Triggers an event. Returns whether the job has completed a step after the event."""
        before, step = self.hosts.generation()["number"], self.hosts.step()
        self.events.trigger = None
        line = self._followed(act(), before, step)
        if (trigger := self.events.trigger) is not None:
            # The same step shows that the job survived both events.
            first = {
                "what": trigger.what,
                "who": list(trigger.who),
                "at": trigger.at,
                "during": trigger.during,
                "seconds": None,
            }
            self._add({**line, **first})
        self._add({**line, "event": len(self.done) + 1})
        if not line["survived"]:
            print(self._said(), flush=True)
            self._begin_again()
        return line["survived"]

    def _followed(self, happened: Happened, before: int, step: int) -> dict[str, Any]:
        """Waits for the step after an event, or for a timeout. Returns the event's record."""
        if happened.changes_hands:
            first = wait_for(
                lambda: self.hosts.first_step_at(
                    self._last_before(before, happened), happened.needed, happened.allowed
                ),
                SURVIVE_SECONDS,
            )
        else:
            wait_for(lambda: self.hosts.step() > step + 1, SURVIVE_SECONDS)
            first = time.time() if self.hosts.step() > step + 1 else None
        generation = self.hosts.generation()
        failures = [*happened.failures, *([] if first else ["no step was completed after it"])]
        return {
            "event": len(self.done) + 1,
            "what": happened.what,
            "who": list(happened.who),
            "during": happened.during,
            "at": happened.at,
            "survived": not failures,
            "generation": generation["number"],
            "members": list(generation["members"]),
            "step": self.hosts.step(),
            "seconds": round(first - happened.at, 2) if first else None,
            "failures": failures,
        }

    def _last_before(self, before: int, happened: Happened) -> int:
        """Returns the newest generation that was created before the event."""
        generation = self.hosts.generation()
        is_later = generation["number"] > before and generation["agreed"] > happened.at
        return generation["number"] - is_later

    def _steps_after(self, before: int, needed: set[int]) -> float | None:
        return wait_for(lambda: self.hosts.first_step_at(before, needed, needed), SURVIVE_SECONDS)

    def _add(self, line: dict[str, Any]) -> None:
        self.done.append(line)
        with self._record.open("a") as file:
            file.write(json.dumps(line) + "\n")
        seconds = "" if line["seconds"] is None else f", next step after {line['seconds']:.1f} s"
        print(
            f"event {line['event']}: {line['what']} {line['who']}, in {line['during'] or '?'}: "
            f"generation {line['generation']} of {line['members']}, step {line['step']}"
            f"{seconds}{''.join(f'; NOT SURVIVED: {item}' for item in line['failures'])}",
            flush=True,
        )

    def _begin_again(self) -> None:
        """Ends and restarts all hosts, so that one failure does not hide the next."""
        for host in self.hosts.hosts:
            host.end()
        self.events.away, self.events.asleep = set(), set()
        self.begin()

    def _said(self) -> str:
        return "\n".join(
            f"host {host.number}: {host.log.read_text(errors='replace')[-1500:]}"
            for host in self.hosts.hosts
            if host.log.exists()
        )

    def end(self, num_steps: int = _STEPS_TO_THE_END) -> Row:
        """Asks all hosts to leave, then restarts them and trains `num_steps` more steps."""
        row = Row("all hosts leave on request, return and train to the last step")
        for number in self.events.asleep:
            self.hosts[number].end()
        asked = [host for host in self.hosts.hosts if host.runs]
        for host in asked:
            host.ask_to_leave()
        row.failures += self._not_ended(asked, "asked to end")
        last = last_step(self.hosts.settings.job) + num_steps
        for host in self.hosts.hosts:
            host.start(f"run.num_train_steps={last}")
        row.failures += self._not_ended(self.hosts.hosts, "trained to the end")
        row.tried = len(asked) + len(self.hosts.hosts)
        return row

    def _not_ended(self, hosts: Sequence[Host], what: str) -> list[str]:
        """Returns a message for each host that does not exit with status 0 in time."""
        wait_for(lambda: not any(host.runs for host in hosts), SURVIVE_SECONDS)
        return [
            f"host {host.number}, {what}, has status {host.status}: "
            f"{host.log.read_text(errors='replace')[-500:]}"
            for host in hosts
            if host.status != 0
        ]


def undisturbed(settings: Settings, num_steps: int, job: Path) -> None:
    """Trains the same job undisturbed, in one process with the same number of devices."""
    if last_step(job) >= num_steps:
        return
    # Omit the pauses, which do not affect the results.
    alone = dataclasses.replace(settings, job=job)
    argv = alone.argv("hooks[0].seconds=0.0", f"run.num_train_steps={num_steps}")
    log = job.with_name(f"{job.name}.log")
    with log.open("ab") as file:
        done = subprocess.run(
            [sys.executable, "-m", "praxis_lite", *argv],
            cwd=CHECKOUT,
            env=alone.env(settings.num_hosts * settings.num_devices),
            stdout=file,
            stderr=file,
        )
    if done.returncode:
        raise SystemExit(f"the undisturbed run ended with status {done.returncode}; see {log}")


def judged(
    folder: Path,
    chaos: Chaos,
    *,
    disk_steps: int = DISK_STEPS,
    num_steps: int = _STEPS_TO_THE_END,
) -> list[Row]:
    """Ends a job, compares it with an undisturbed run, and prints and writes the result.

    Args:
      folder: Folder of the job.
      chaos: The events of the job.
      disk_steps: Number of steps between saves on disk.
      num_steps: Number of steps that the job trains after all hosts have returned.
    """
    settings, events, ended = chaos.hosts.settings, chaos.done, chaos.end(num_steps)
    job, whole = settings.job, folder / "undisturbed"
    undisturbed(settings, last_step(job), whole)
    compared = verdict.verdict(
        job, whole, peer_steps=PEER_STEPS, disk_steps=disk_steps, env=settings.env(1)
    )
    rows = [events_row(events), ended, *compared]
    seconds = seconds_by_part(verdict.changes(job))
    tables = report_lines(rows, events, seconds)
    print("\n".join(tables), flush=True)
    result = {
        "events": events,
        "steps": last_step(job),
        "seconds": seconds,
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    (folder / "verdict.json").write_text(json.dumps(result, indent=1) + "\n")
    (folder / "verdict.md").write_text("\n".join(tables) + "\n")
    return rows


def _page(args: argparse.Namespace, folder: Path) -> str:
    """Returns the report as a Markdown page."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("jax", "orbax-checkpoint"))
    return "\n".join(
        [
            "# Elastic job with random host failures",
            "",
            "Written by `python -m tests.elastic.chaos` (`make chaos`). The job trains on "
            "a mixture of",
            "packed texts, with dropout, a moving average of the weights and gradient "
            "accumulation. Its hosts are",
            "killed, stopped and restarted at random. The results are compared with an "
            "undisturbed run in one process.",
            "",
            f"{time.strftime('%Y-%m-%d')}, seed {args.seed}, {args.members} processes with "
            f"{args.devices} simulated devices each on {os.cpu_count()} cores (load average at the "
            f"end: {os.getloadavg()[2]:.0f}), Python {platform.python_version()}, {versions}.",
            "",
            (folder / "verdict.md").read_text(),
        ]
    )


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def main() -> int:
    """Runs the events and the comparison; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--events", type=int, default=100)
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--devices", type=int, default=2, help="simulated devices per member")
    parser.add_argument("--least", type=int, default=1, help="--min_processes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=Path, metavar="FILE", help="report to overwrite")
    parser.add_argument("--set", dest="settings", nargs="+", default=[], help="as for main.py")
    args = parser.parse_args()
    folder = args.dir.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # Also ends the hosts.
    settings = settings_of(folder, args.members, args.devices, args.least, *args.settings)
    with Hosts(settings) as hosts:
        chaos = Chaos(hosts, folder, args.seed)
        chaos.begin()
        chaos.run(args.events)
        rows = judged(folder, chaos)
    if args.report:
        args.report.write_text(_page(args, folder), encoding="utf-8")
    return int(any(row.failures for row in rows))


if __name__ == "__main__":
    sys.exit(main())
