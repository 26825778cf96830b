"""Prints how many compiler options of our presets libtpu accepts, and the rejected ones."""

import json
import logging

import jax
import numpy as np


def main() -> None:
    """Compiles for each kind of TPU; no TPU is required."""
    jax.config.update("jax_platforms", "cpu")
    from praxis_lite.core.partitioner.compiler_options import ACCUMULATING, DECODING, step_options
    from praxis_lite.core.sharding.devices.axis_types import mesh_of
    from praxis_lite.layers.whole_model.sharding_presets import COMPILER_OPTIONS
    from praxis_tools.plan.job_on_topology import PLANNING_OPTIONS
    from praxis_tools.plan.topology import topology_of

    left_out, given = [], set()
    logging.getLogger("praxis_lite").addHandler(handler := logging.Handler())
    handler.addFilter(lambda record: record.getMessage().startswith("mesh.compiler_options"))
    handler.emit = lambda record: left_out.append(record.getMessage())
    for name, topology in (("v5e", "v5e:2x2"), ("v5p", "v5p:2x2x1"), ("v6e", "v6e:2x2")):
        mesh = mesh_of(np.asarray(topology_of(topology).devices), ("data",))
        planned = {"tpu": PLANNING_OPTIONS.get(name, {})}
        ours = {"tpu": DECODING | ACCUMULATING}
        for options in (*COMPILER_OPTIONS.values(), planned, ours):
            given |= (step_options(options, mesh) or {}).keys()
    print(json.dumps([len(given), left_out]))


if __name__ == "__main__":
    main()
