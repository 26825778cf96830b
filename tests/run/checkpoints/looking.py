"""Looks at hostile folders in a process of its own, whose memory is limited."""

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
# What a folder may take besides what the process has at its start; bombs want gigabytes.
MOST_BYTES = 700 * 2**20

LOOK = """
import json, resource, sys, traceback
from pathlib import Path
from praxis_lite.core.errors import ConfigError
READ

good, most, *folders = sys.argv[1:]
read(Path(good))  # All that is imported late is imported now.
mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + int(most), mapped + int(most)))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
seen = []
sys.addaudithook(lambda event, args: seen.append((event, str(args[0]) if args else "")))
for folder in folders:
    modules = set(sys.modules)
    seen.clear()
    print(json.dumps({"folder": folder}), flush=True)
    told = {"folder": folder, "how": "accepted", "words": ""}
    try:
        read(Path(folder))
    except ConfigError as error:
        told |= {"how": "refused", "words": str(error)}
    except BaseException:
        told |= {"how": "other", "words": traceback.format_exc()}
    opened = [what for event, what in seen if event in ("open", "os.scandir", "os.listdir")]
    told["opened"] = [what for what in opened if not what.isdigit()]  # Of an open file.
    told["done"] = [x for x in seen if x[0].split(".")[0] in
                    ("subprocess", "socket", "shutil", "ctypes") or x[0] in ("exec", "os.system",
                     "os.rename", "os.remove", "os.mkdir", "os.symlink", "os.rmdir", "os.link")]
    told["imported"] = sorted(set(sys.modules) - modules)
    print(json.dumps(told), flush=True)
"""


def look(
    read: str, good: Path, folders: Iterable[Path], *, before: Sequence[str] = ()
) -> dict[str, dict[str, Any] | None]:
    """Returns the answer to each folder, by path, or None if the process ended or hung.

    That is "how" ("accepted", "refused" or "other"), "words", "opened", "done", "imported".

    Args:
      read: Python's text that defines `read(folder)`, which raises ConfigError or reads all.
      good: a folder that can be read.
      before: of the command line.
    """
    actual, left = {}, [str(folder) for folder in folders]
    while left:
        command = [
            *before, sys.executable, "-c", LOOK.replace("READ", read), str(good), str(MOST_BYTES)
        ]
        try:
            done = subprocess.run(
                [*command, *left], cwd=ROOT, capture_output=True, text=True, timeout=60,
            )
            code, out, err = done.returncode, done.stdout, done.stderr
        except subprocess.TimeoutExpired as hung:
            code, out, err = -1, hung.stdout.decode(), "it hung"
        for line in map(json.loads, out.splitlines()):
            actual[line["folder"]] = line if "how" in line else None
        if code == 0:
            break
        assert out, err
        left = left[left.index(json.loads(out.splitlines()[-1])["folder"]) + 1 :]
    return actual
