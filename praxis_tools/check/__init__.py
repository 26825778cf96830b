"""Checks that a job computes the same results on a mesh as on a single device.

`--mode=check` and tests of your models use it. It runs the steps of a job in float64 and in the
job's dtypes, and never accesses the job directory.
"""

from praxis_lite.public_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__)
