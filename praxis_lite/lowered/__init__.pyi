# Where each public name is defined; `__init__.py` loads it on first use.

from praxis_lite.lowered.mended_products import mended as mended
