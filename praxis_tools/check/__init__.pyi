# Where each public name is defined; `__init__.py` loads it on first use.

from praxis_tools.check.asserts.collectives import CompiledStep as CompiledStep
from praxis_tools.check.asserts.collectives import assert_collectives as assert_collectives
from praxis_tools.check.asserts.collectives import compiled_step as compiled_step
from praxis_tools.check.asserts.layers import assert_near as assert_near
from praxis_tools.check.asserts.layers import drawn as drawn
from praxis_tools.check.asserts.layers import revealing as revealing
from praxis_tools.check.asserts.layers import run_layers as run_layers
from praxis_tools.check.certificate import Certificate as Certificate
from praxis_tools.check.on_meshes import check_on_meshes as check_on_meshes
