"""Programs that are lowered and not compiled yet: what XLA would compute wrong in them, mended.

It never sees tasks, layers or jobs.
"""

from praxis_lite.public_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__)
