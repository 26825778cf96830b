"""Where jobs are killed: in a step, in a save, while an old step goes, at start-up; and a plan.

Each point is an event of tests.faults.hooks, or a time after a line was printed ("after") or a
folder has appeared ("when").
"""

import dataclasses
import random
from collections.abc import Mapping
from typing import Any

from tests.faults.zoo import SAVE_EVERY

STEP, SAVE, DELETE, START = "in a step", "in a save", "deleting an old step", "at start-up"
END = "drawing the curve at the end"
_SAVING, _DELETING, _STEP_DIR = r"/\d+\.saving", r"/\d+\.deleting", r"/checkpoints/\d+$"
_DELETED = r"/checkpoints/\d+(\.deleting)?$"

# What a phase has as points, each an event of tests.faults.hooks; `do` is the signal.
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
        # In the deletion itself, whatever the folder is called then.
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
# After a launch that was killed in a save, or while it deleted: what is left is cleaned up.
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
# The newest step is damaged before the launch, which is killed while it puts it aside.
QUARANTINE = (
    {"at": "os.rename", "matches": r"\d+\.damaged", "damaged": True},
    {"at": "os.rename", "matches": r"\d+\.damaged", "damaged": True, "then": 1},
)
# All steps are made and saved: every other chain ends with one of these.
CURVE = (
    {"at": "open for writing", "matches": r"loss_curve\.png"},
    {"at": "open for writing", "matches": r"loss_curve\.png", "then": 1},
)


@dataclasses.dataclass(frozen=True)
class Kill:
    """One kill of the plan: the signal, the phase it counts for, and the point."""

    name: str
    phase: str
    point: Mapping[str, Any]


def plan(num_kills: int, seed: int) -> list[list[Kill]]:
    """Returns kills in the order they are made, in groups that must follow each other."""
    rng, groups, count = random.Random(seed), [], 0
    phases = [STEP, SAVE, DELETE, START]
    while count < num_kills:
        # Three of KILL to two of TERM.
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
    """Returns the point with what is left to chance: which time it comes, or when."""
    if "seconds" in point:
        return {**point, "seconds": round(rng.uniform(0, point["seconds"]), 3)}
    if phase == STEP:
        return {**point, "nth": rng.randint(1, 2 * SAVE_EVERY)}
    return {**point, "nth": rng.choice([1, 1, 2])} if phase in (SAVE, DELETE) else dict(point)
