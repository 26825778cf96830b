"""The role of this process in an elastic job, whose number of processes changes during the run."""

import dataclasses

__all__ = ("Membership",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Membership:
    """The role of a process in one generation of an elastic job.

    A generation is a fixed set of processes. When the set changes, supervisors start the next
    generation.

    Attributes:
      generation: Number of the generation.
      member: Number of this process's host (`--process_id`); the same in every generation.
      members: Numbers of all members, in the order of their process indices.
      num_slots: Number of processes in the complete job (`--num_processes`).
      coordinator: "HOST:PORT" of JAX's coordination service in this generation.
      key: Secret that authenticates the processes to each other.
      lost_status: Exit status of a process that exits because another process was lost.
      supervisor: "HOST:PORT" at which the supervisor of this process accepts connections. This
        process is killed when its supervisor ends.
    """

    generation: int
    member: int
    members: tuple[int, ...]
    num_slots: int
    coordinator: str
    key: bytes
    lost_status: int
    supervisor: str = ""

    @property
    def index(self) -> int:
        """Index of this process in the generation."""
        return self.members.index(self.member)


_membership: Membership | None = None


def membership() -> Membership | None:
    """Returns the role of this process in an elastic job, or None if the job is not elastic."""
    return _membership


def join(new: Membership) -> None:
    """Sets the role of this process in an elastic job."""
    global _membership
    _membership = new
