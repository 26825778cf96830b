# Where each public name is defined; `__init__.py` loads it on first use.

from praxis_lite.core.xla_workarounds.patched_matmuls import patch_matmuls as patch_matmuls
