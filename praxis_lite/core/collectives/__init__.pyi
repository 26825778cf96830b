# Where each public name is defined; `__init__.py` loads it on first use.

from praxis_lite.core.collectives.explicit_collectives import (
    ExplicitCollectives as ExplicitCollectives,
)
