"""The part that this process has in a job whose number of processes changes while it runs."""

import dataclasses

__all__ = ("Membership",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Membership:
    """A process's part in a generation of processes; its supervisor starts the next one.

    Attributes:
      generation: its number.
      member: the number of this process's host, `--process_id`, which stays the same.
      members: the numbers of all, in the order of their processes.
      num_slots: of processes in the complete job, `--num_processes`.
      coordinator: "host:port" of JAX's coordination service in this generation.
      key: the secret by which the processes know each other.
      lost_status: the exit status of a process that ends because another is gone.
    """

    generation: int
    member: int
    members: tuple[int, ...]
    num_slots: int
    coordinator: str
    key: bytes
    lost_status: int

    @property
    def index(self) -> int:
        """The index of this process in the generation."""
        return self.members.index(self.member)


_membership: Membership | None = None


def membership() -> Membership | None:
    """Returns the part of this process; None in a job whose processes stay the same."""
    return _membership


def join(part: Membership) -> None:
    """Makes `part` that of this process."""
    global _membership
    _membership = part
