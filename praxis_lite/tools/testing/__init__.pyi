# Where each public name is defined; `__init__.py` loads it on first use.

from praxis_lite.tools.testing.asserts.collectives import CompiledStep as CompiledStep
from praxis_lite.tools.testing.asserts.collectives import assert_collectives as assert_collectives
from praxis_lite.tools.testing.asserts.collectives import compiled_step as compiled_step
from praxis_lite.tools.testing.asserts.layers import assert_near as assert_near
from praxis_lite.tools.testing.asserts.layers import drawn as drawn
from praxis_lite.tools.testing.asserts.layers import revealing as revealing
from praxis_lite.tools.testing.asserts.layers import run_layers as run_layers
from praxis_lite.tools.testing.certificate import Certificate as Certificate
from praxis_lite.tools.testing.on_meshes import check_on_meshes as check_on_meshes
