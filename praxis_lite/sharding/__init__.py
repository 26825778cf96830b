"""WHERE arrays live: meshes, split-dims mappings, padding, batches. Knows jax and numpy only."""

from praxis_lite.sharding.inputs import global_batch, reshard_by_rank
from praxis_lite.sharding.mesh import MeshConfig, compiled_platform, make_mesh, simulate_devices
from praxis_lite.sharding.padding import pad_tree, padded_shape, unpad_tree
from praxis_lite.sharding.split_dims import SplitDims, constrain, to_partition_spec

__all__ = [
    "MeshConfig",
    "SplitDims",
    "compiled_platform",
    "constrain",
    "global_batch",
    "make_mesh",
    "pad_tree",
    "padded_shape",
    "reshard_by_rank",
    "simulate_devices",
    "to_partition_spec",
    "unpad_tree",
]
