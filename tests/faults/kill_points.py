"""The points at which jobs are killed, and a random plan of kills.

A point is an event of tests.faults.hooks, or a time after a line was printed ("after") or a folder
has appeared ("when").
"""

import dataclasses
import random
from collections.abc import Mapping
from typing import Any

from tests.faults.zoo import SAVE_EVERY

STEP, SAVE, DELETE = "during a step", "during a save", "while deleting an old step"
START, END = "during startup", "while plotting the final loss curve"
_SAVING, _DELETING, _STEP_DIR = r"/\d+\.saving", r"/\d+\.deleting", r"/checkpoints/\d+$"
_DELETED = r"/checkpoints/\d+(\.deleting)?$"

# The points in each phase. The signal is added as `do`.
POINTS: Mapping[str, tuple[dict[str, Any], ...]] = {
    STEP: (
        {"at": "step"},
        {"at": "half a metrics line"},
        {"after": "compiling the first step", "seconds": 1.0},
    ),
    SAVE: (
        {"at": "os.mkdir", "matches": _SAVING},
        {"at": "os.mkdir", "matches": _SAVING, "then": 1},
        {"at": "os.mkdir", "matches": _SAVING, "then": 3},
        {"at": "os.rename", "matches": _SAVING + "$"},
        {"at": "os.rename", "matches": _SAVING + "$", "then": 1},
        {"at": "open for writing", "matches": _SAVING + r"/manifest\.json"},
        {"at": "open for writing", "matches": _SAVING + r"/commit\.json"},
        {"at": "open for writing", "matches": _SAVING + r"/commit\.json", "then": 1},
        {"at": "os.rename", "matches": _STEP_DIR},
        {"at": "os.rename", "matches": _STEP_DIR, "then": 1},
        {"when": "*.saving*", "seconds": 0.1},
        {"when": "*.saving*", "seconds": 0.02},
    ),
    DELETE: (
        {"at": "os.rename", "matches": _DELETING},
        {"at": "os.rename", "matches": _DELETING, "then": 1},
        # During the deletion itself, before or after the folder is renamed.
        {"at": "shutil.rmtree", "matches": _DELETED, "then": 2},
        {"at": "shutil.rmtree", "matches": _DELETED, "then": 8},
        {"at": "shutil.rmtree", "matches": _DELETED, "then": 20},
    ),
    START: (
        {"after": "", "seconds": 1.5},
        {"after": "mesh", "seconds": 0.3},
        {"at": "open", "matches": r"/checkpoints/\d+/manifest\.json"},
        {"at": "os.rename", "matches": r"config\.json$"},
        {"at": "open", "matches": r"/checkpoints/\d+/opt_states/manifest\.ocdbt r$"},
        {"at": "open for writing", "matches": r"layout\.txt"},
        {"at": "open for writing", "matches": r"/metrics\.jsonl"},
    ),
}
# Pairs of kills: the first leaves files behind, and the second interrupts their cleanup.
CLEANING = (
    (
        {"at": "os.mkdir", "matches": _SAVING, "then": 2},
        {"at": "shutil.rmtree", "matches": _SAVING, "then": 1},
    ),
    (
        {"at": "os.rename", "matches": _DELETING, "then": 2},
        {"at": "shutil.rmtree", "matches": _DELETING, "then": 2},
    ),
)
# The newest step is damaged before the launch, which is killed while renaming the damaged step.
QUARANTINE = (
    {"at": "os.rename", "matches": r"\d+\.damaged", "damaged": True},
    {"at": "os.rename", "matches": r"\d+\.damaged", "damaged": True, "then": 1},
)
# After all steps are completed and saved. Every other chain ends with one of these points.
CURVE = (
    {"at": "open for writing", "matches": r"loss_curve\.png"},
    {"at": "open for writing", "matches": r"loss_curve\.png", "then": 1},
)


@dataclasses.dataclass(frozen=True)
class Kill:
    """A planned kill: the signal, the phase for the report, and the point."""

    name: str
    phase: str
    point: Mapping[str, Any]


def plan(num_kills: int, seed: int) -> list[list[Kill]]:
    """Returns kills in order. The kills in a group must directly follow each other."""
    rng, groups, count = random.Random(seed), [], 0
    phases = [STEP, SAVE, DELETE, START]
    while count < num_kills:
        # Three KILL signals for every two TERM signals.
        name = ("KILL", "TERM", "KILL", "TERM", "KILL")[len(groups) % 5]
        turn = len(groups) % 13
        if turn == 5 and name == "KILL":
            first, second = rng.choice(CLEANING)
            group = [Kill("KILL", SAVE, first), Kill(rng.choice(["KILL", "TERM"]), START, second)]
        elif turn == 9:
            group = [Kill(name, START, rng.choice(QUARANTINE))]
        else:
            phase = phases[len(groups) % 4]
            group = [Kill(name, phase, _drawn(rng, phase, rng.choice(POINTS[phase])))]
        groups.append(group)
        count += len(group)
    return groups


def _drawn(rng: random.Random, phase: str, point: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the point with a random occurrence number or a random delay."""
    if "seconds" in point:
        return {**point, "seconds": round(rng.uniform(0, point["seconds"]), 3)}
    if phase == STEP:
        return {**point, "nth": rng.randint(1, 2 * SAVE_EVERY)}
    return {**point, "nth": rng.choice([1, 1, 2])} if phase in (SAVE, DELETE) else dict(point)
