"""Checks that a job computes the same results on a mesh as on a single device.

Used by `praxis check` and by tests of your models. The steps of a job run in float64 and in the
job's dtypes, and the job directory is never accessed.
"""

from praxis_lite.public_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__)
