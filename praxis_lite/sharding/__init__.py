"""WHERE arrays live: meshes, mappings, rules, padding, batches.

Never sees a layer, a model or a step.
"""

from praxis_lite.sharding.inputs import global_batch, reshard_by_rank
from praxis_lite.sharding.logical_axes import MeshRules, logical_to_mesh_axes
from praxis_lite.sharding.mesh import (
    MeshConfig,
    attached_mesh,
    compiled_platform,
    filled_mesh,
    make_mesh,
    simulate_devices,
)
from praxis_lite.sharding.named_shardings import infer_sharding
from praxis_lite.sharding.padding import pad_tree, padded_shape, unpad_tree
from praxis_lite.sharding.rule_names import register_rule
from praxis_lite.sharding.rules import Fsdp, LogicalPartitioning, Replicate, ShardDim
from praxis_lite.sharding.split_dims import SplitDims, constrain, to_partition_spec
from praxis_lite.sharding.strategies import rule_shardings
from praxis_lite.sharding.weight_sharding import WeightSharding
from praxis_lite.sharding.weight_spec import WeightSpec

__all__ = [
    "Fsdp",
    "LogicalPartitioning",
    "MeshConfig",
    "MeshRules",
    "Replicate",
    "ShardDim",
    "SplitDims",
    "WeightSharding",
    "WeightSpec",
    "attached_mesh",
    "compiled_platform",
    "constrain",
    "filled_mesh",
    "global_batch",
    "infer_sharding",
    "logical_to_mesh_axes",
    "make_mesh",
    "pad_tree",
    "padded_shape",
    "register_rule",
    "reshard_by_rank",
    "rule_shardings",
    "simulate_devices",
    "to_partition_spec",
    "unpad_tree",
]
