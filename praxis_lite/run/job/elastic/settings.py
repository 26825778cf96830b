"""What the command line says of an elastic job."""

import dataclasses
from pathlib import Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What the command line says of an elastic job.

    Attributes:
      argv: the command line that each worker gets.
      job: the job's directory.
      member, num_members: `--process_id` and `--num_processes`, or what a launcher says.
      min_members: `--min_processes`.
      start_seconds: how long the first generation waits for all members.
      address: where other hosts reach this host.
    """

    argv: tuple[str, ...]
    job: Path
    member: int
    num_members: int
    min_members: int
    start_seconds: float
    address: str
