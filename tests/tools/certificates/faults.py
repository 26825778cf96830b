"""Injects each fault into a training job, and reports which of them a certificate locates.

python -m tests.tools.certificates.faults [-k WORDS]
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable

from praxis_lite.core import simulate_devices


@dataclasses.dataclass(frozen=True)
class Fault:
    """What is broken, and what a certificate is to say of it.

    Attributes:
      name: in words.
      found: returns the first difference, or None.
      device: its id, or None: the program's.
      axis, layer, leaf: a part of each; "": any.
    """

    name: str
    found: Callable[[], object]
    device: int | None = None
    axis: str = ""
    layer: str = ""
    leaf: str = ""

    def missed(self, actual) -> str:
        """Returns a sentence on the part of this fault that was missed, or ""."""
        if actual is None:
            return "not found"
        device = "" if self.device is None else f"device {self.device} ("
        if (actual.cause == "device") != (self.device is not None):
            return f"cause {actual.cause}"
        if device not in actual.device:
            return f"{actual.device} instead of {self.device}"
        for kind in ("axis", "layer", "leaf"):
            if getattr(self, kind) not in getattr(actual, kind):
                return f"{kind} {getattr(actual, kind)} instead of {getattr(self, kind)}"
        return ""


def all_faults() -> list[Fault]:
    """Returns all faults: devices, copies, restored states, programs, updates."""
    from tests.tools.certificates import planted

    return [
        *planted.devices(),
        *planted.copies(),
        *planted.restored(),
        *planted.programs(),
        *planted.spoiled_states(),
        *planted.wrong_updates(),
    ]


def main() -> int:
    """Returns 1 if a fault was not found, or at another place than its own."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.certificates.faults")
    parser.add_argument("-k", default="", help="only faults with this in their name")
    args = parser.parse_args()
    simulate_devices(8)
    import jax

    from praxis_tools.explain.compiler_warnings import explained_warnings

    number, num_missed, began = 0, 0, time.monotonic()
    with explained_warnings(lambda warning: None):
        for fault in all_faults():
            if args.k not in fault.name:
                continue
            actual = fault.found()
            missed = fault.missed(actual)
            number, num_missed = number + 1, num_missed + bool(missed)
            seconds = time.monotonic() - began
            print(f"[{seconds:5.0f} s] {fault.name}: {missed.upper()} {actual}", flush=True)
            jax.clear_caches()
    print(f"{number - num_missed} of {number} faults found")
    return int(num_missed > 0)


if __name__ == "__main__":
    sys.exit(main())
