"""The settings of an elastic job, from the command line."""

import dataclasses

from praxis_lite.job.job_dir import JobDir


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of an elastic job, from the command line.

    Attributes:
      argv: the command line that each worker gets.
      job: the job's directory.
      member, num_members: `--process_id` and `--num_processes`, or what a launcher says.
      min_members: `--min_processes`.
      start_seconds: how long the first generation waits for all members.
      address: where other hosts reach this host.
    """

    argv: tuple[str, ...]
    job: JobDir
    member: int
    num_members: int
    min_members: int
    start_seconds: float
    address: str
