"""A worker of an elastic job that counts what it compiles: FOLDER, MEMBER, MEMBERS, and flags.

    python -m tests.support.counted_start JOB/elastic 3 1,3,5 --exp=... --job_log_dir=JOB ...

The last line of standard error is JSON: {"asked": programs, "compiled": those in no cache}.
"""

import collections
import json
import sys

import jax

from praxis_lite.main import main
from praxis_lite.run.job.elastic import order

NUM_SLOTS = 2
_EVENTS = "/jax/compilation_cache/"


def run(folder: str, member: str, members: str, *argv: str) -> None:
    """Takes the order that the arguments describe, and runs the command line."""
    counted: collections.Counter = collections.Counter()
    jax.monitoring.register_event_listener(lambda name, **more: counted.update([name]))
    order.take(
        order.Order(
            generation=1, member=int(member), members=tuple(map(int, members.split(","))),
            stores=(), store_key=b"", coordinator="", num_slots=NUM_SLOTS, folder=folder,
        ),
        -1,
    )
    main(argv)
    asked = counted[f"{_EVENTS}compile_requests_use_cache"]
    compiled = asked - counted[f"{_EVENTS}cache_hits"]
    print(json.dumps({"asked": asked, "compiled": compiled}), file=sys.__stderr__)


if __name__ == "__main__":
    run(*sys.argv[1:])
