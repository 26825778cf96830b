"""Uses a store behind a proxy that injects faults: operations, and jobs that are killed.

A job reads its data from the store, saves, is killed at a request, restores and continues, until it
has trained all steps. A copy of its folder on disk must then be bitwise equal to a job on disk
without faults.
"""

import dataclasses
import os
import random
import re
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.faults.outcome import Outcome, Row, outcome_of, tail
from tests.faults.store_operations import OPERATIONS, Trial
from tests.faults.zoo import home, train_argv
from tests.faults.zygote import Zygote
from tests.support.faulty_store import KINDS, Kill, faulty_bucket

# Requests at which a job is killed, before or after they are carried out.
_REQUESTS = (
    r"PUT \S*/manifest\.json",
    r"PUT \S*/steps\.json",
    r"PUT \S*/commit\.json",
    r"(PUT|POST) \S*/mdl_vars/manifest\.ocdbt",
    r"PUT \S*/metrics\.jsonl",
    r"PUT \S*/\.training",
    r"PUT \S*/\.listed",
    r"POST \S*\?delete|DELETE",
)
_MAX_LAUNCHES = 40


def run(
    scheme: str,
    num_faults: int,
    num_kills: int,
    seed: int,
    say: Callable[[str], None],
    *,
    settings: tuple[str, ...] = (),
    rate: float = 0.15,
) -> list[Row]:
    """Returns a row for each kind of fault, and rows for the operations, the jobs and the kills.

    Args:
      scheme: "s3" or "gs".
      num_faults: Minimum number of faults, half of them while jobs run.
      num_kills: Number of kills; up to five per job.
      seed: Seed of the faults, the operations and the kills.
      say: Function that prints a line of progress.
      settings: Settings of the job, as for --set.
      rate: Probability that a request fails.
    """
    undisturbed, store = home() / "undisturbed", faulty_bucket(scheme, seed, rate)
    with Zygote(timeout_seconds=1800.0) as zygote, store as (url, proxy, client):
        launch = zygote.launch(train_argv(undisturbed, *settings))
        assert launch.code == 0, tail(launch)
        trial = Trial(url, proxy, client, seed)
        for operation in OPERATIONS:
            operation(trial, num_faults // 10)
            say(f"  {operation.__name__}: {len(proxy.injected)} faults")
        operations = Row("operations agree with a model", trial.done, failures=trial.failures)
        jobs = _jobs(zygote, trial, outcome_of(undisturbed), num_faults, num_kills, settings, say)
    raised = Counter(kind for kind, _ in trial.raised)
    faults = [Row(kind, proxy.injected.count(kind), {"errors": raised[kind]}) for kind in KINDS]
    rows = [*faults, operations, *jobs]
    return [dataclasses.replace(row, what=f"{scheme}://, {row.what}") for row in rows]


def _jobs(
    zygote: Zygote,
    trial: Trial,
    undisturbed: Outcome,
    num_faults: int,
    num_kills: int,
    settings: tuple[str, ...],
    say: Callable[[str], None],
) -> list[Row]:
    """Trains jobs until a number of faults, including earlier ones, and of kills is reached."""
    kills = Row("SIGKILL of a job at a request")
    jobs = Row("jobs: metrics, evaluations and digests are bitwise equal to a job on disk")
    rng = random.Random(trial.seed)
    data = f"datasets.train.arrays.file={_data(trial)}"
    while len(trial.proxy.injected) < num_faults or kills.tried < num_kills:
        url = f"{trial.url}/jobs/{jobs.tried}"
        failures = _train(zygote, trial, url, (*settings, data), kills, num_kills, rng)
        if not failures:
            copy = _copy(trial.client, f"jobs/{jobs.tried}/")
            failures = outcome_of(copy).differences(undisturbed, all_steps=False)
            shutil.rmtree(copy)
        jobs.tried += 1
        jobs.failures += [f"{url}: {failure}" for failure in failures]
        say(f"  {jobs.tried} jobs, {len(trial.proxy.injected)} faults, {kills.tried} kills")
        if failures:
            break
    return [kills, jobs]


def _train(
    zygote: Zygote,
    trial: Trial,
    url: str,
    settings: tuple[str, ...],
    kills: Row,
    num_kills: int,
    rng: random.Random,
) -> list[str]:
    """Launches a job until it has trained all steps, and returns its failures."""
    proxy, last_kill = trial.proxy, min(num_kills, kills.tried + 5)
    for _ in range(_MAX_LAUNCHES):
        shutil.rmtree(home() / "cache" / "praxis_lite" / "stores", ignore_errors=True)
        request, nth, carried_out = rng.choice(_REQUESTS), rng.randrange(1, 4), rng.random() < 0.5
        before, is_last = len(proxy.injected), kills.tried >= last_kill

        def meanwhile(pid: int, _: Path) -> None:
            proxy.kill = None if is_last else Kill(pid, request, nth, carried_out)  # noqa: B023

        names = [
            name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "TENSORSTORE_"))
        ]
        env = {name: os.environ[name] for name in names}
        launch = zygote.launch(train_argv(url, *settings), env=env, meanwhile=meanwhile)
        proxy.kill = None
        if launch.code == 0:
            return []
        if launch.code == -signal.SIGKILL:
            kills.tried += 1
        elif launch.code == 2 and "Traceback" not in launch.err and proxy.injected[before:]:
            trial.raised.append((proxy.injected[-1], tail(launch)))
        else:
            return [tail(launch)]
    return [f"did not complete in {_MAX_LAUNCHES} launches"]


def _data(trial: Trial) -> str:
    """Stores the data of the job, and returns its URL."""
    from faultzoo.experiments import rows

    file = home() / "train.npz"
    np.savez(file, **rows(0, ""))
    trial.client.put("data/train.npz", file)
    return f"{trial.url}/data/train.npz"


def _copy(client: Any, prefix: str) -> Path:
    """Copies the objects of a job to a folder, without the proxy, and joins the parts of files."""
    folder = home() / "copy"
    keys = [meta["path"] for batch in client.list(prefix) for meta in batch]
    parts = {key: re.fullmatch(r"(.+)\.part([1-9][0-9]*)", key) for key in keys}
    order = {key: (match[1], int(match[2])) if match else (key, 0) for key, match in parts.items()}
    for key in sorted(keys, key=order.__getitem__):
        path = folder / order[key][0].removeprefix(prefix)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(client.get(key).bytes())
    return folder
