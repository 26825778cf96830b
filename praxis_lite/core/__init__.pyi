# Where each public name is defined; `__init__.py` loads it on first use.

from praxis_lite.core.callables import check_takes as check_takes
from praxis_lite.core.callables import function_name as function_name
from praxis_lite.core.errors import ConfigError as ConfigError
from praxis_lite.core.errors import require as require
from praxis_lite.core.learner.gradients import GradientLimits as GradientLimits
from praxis_lite.core.learner.learner import Learner as Learner
from praxis_lite.core.learner.loss_scaling import DynamicLossScale as DynamicLossScale
from praxis_lite.core.learner.optimizer_groups import AuxiliaryOptimizer as AuxiliaryOptimizer
from praxis_lite.core.learner.regularization import VariationalNoise as VariationalNoise
from praxis_lite.core.models.model import Model as Model
from praxis_lite.core.models.nnx_model import NnxModel as NnxModel
from praxis_lite.core.optional_packages import require_package as require_package
from praxis_lite.core.partitioner.partitioner import Partitioner as Partitioner
from praxis_lite.core.partitioner.shard_map_partitioner import (
    ShardMapPartitioner as ShardMapPartitioner,
)
from praxis_lite.core.partitioner.train_state import StateLayout as StateLayout
from praxis_lite.core.partitioner.train_state import TrainState as TrainState
from praxis_lite.core.sharding.inputs import InputsSplitMapping as InputsSplitMapping
from praxis_lite.core.sharding.inputs import global_batch as global_batch
from praxis_lite.core.sharding.inputs import is_true_row as is_true_row
from praxis_lite.core.sharding.inputs import num_rows_of as num_rows_of
from praxis_lite.core.sharding.inputs import reshard_by_rank as reshard_by_rank
from praxis_lite.core.sharding.logical_axes import MeshRules as MeshRules
from praxis_lite.core.sharding.logical_axes import logical_to_mesh_axes as logical_to_mesh_axes
from praxis_lite.core.sharding.mesh import MeshConfig as MeshConfig
from praxis_lite.core.sharding.mesh import attached_mesh as attached_mesh
from praxis_lite.core.sharding.mesh import compiled_platform as compiled_platform
from praxis_lite.core.sharding.mesh import filled_mesh as filled_mesh
from praxis_lite.core.sharding.mesh import make_mesh as make_mesh
from praxis_lite.core.sharding.mesh import simulate_devices as simulate_devices
from praxis_lite.core.sharding.named_shardings import infer_sharding as infer_sharding
from praxis_lite.core.sharding.padding import pad_tree as pad_tree
from praxis_lite.core.sharding.padding import padded_shape as padded_shape
from praxis_lite.core.sharding.padding import unpad_tree as unpad_tree
from praxis_lite.core.sharding.rule_names import JobMesh as JobMesh
from praxis_lite.core.sharding.rule_names import Leaf as Leaf
from praxis_lite.core.sharding.rule_names import Outcome as Outcome
from praxis_lite.core.sharding.rule_names import register_rule as register_rule
from praxis_lite.core.sharding.rules import Fsdp as Fsdp
from praxis_lite.core.sharding.rules import LogicalPartitioning as LogicalPartitioning
from praxis_lite.core.sharding.rules import Replicate as Replicate
from praxis_lite.core.sharding.rules import ShardDim as ShardDim
from praxis_lite.core.sharding.split_dims import SplitDims as SplitDims
from praxis_lite.core.sharding.split_dims import constrain as constrain
from praxis_lite.core.sharding.split_dims import to_partition_spec as to_partition_spec
from praxis_lite.core.sharding.strategies import rule_shardings as rule_shardings
from praxis_lite.core.sharding.weight_sharding import WeightSharding as WeightSharding
from praxis_lite.core.sharding.weight_sharding import decide_shardings as decide_shardings
from praxis_lite.core.sharding.weight_spec import WeightSpec as WeightSpec
from praxis_lite.core.task import LossOutputs as LossOutputs
from praxis_lite.core.task import Task as Task
from praxis_lite.core.task import WeightedScalars as WeightedScalars
from praxis_lite.core.task import records_of as records_of
