"""The run: experiments and their configs (WHAT), jobs, checkpoints and the loops (WHEN).

Never imports `praxis_lite.tools`. What a mode or a hook of your own needs is public here; what an
experiment needs, in `praxis_lite`.
"""

from praxis_lite.public_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__)
