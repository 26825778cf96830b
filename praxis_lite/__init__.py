"""praxis_lite: models written for a single device, run on any mesh.

The names below are loaded on first use, so that `import praxis_lite` and the errors of a mistyped
command cost no import of jax.
"""

from praxis_lite import checkout
from praxis_lite.public_names import public_names

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = public_names(__name__)

checkout.install()
