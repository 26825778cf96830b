# Where each public name is defined; `__init__.py` loads it on first use.

from praxis_lite.pax.checkpoints import read_pax_checkpoint as read_pax_checkpoint
from praxis_lite.pax.weights import mdl_vars_from_pax as mdl_vars_from_pax
from praxis_lite.pax.weights import pax_vars_from_mdl_vars as pax_vars_from_mdl_vars
