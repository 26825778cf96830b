# Where each public name is defined; `__init__.py` loads it on first use.

from praxis_lite.api import train as train
from praxis_lite.checkpoints.checkpoints import Checkpoints as Checkpoints
from praxis_lite.checkpoints.init.loading_rules import LOAD_ALL as LOAD_ALL
from praxis_lite.checkpoints.init.loading_rules import (
    CheckpointLoadingRules as CheckpointLoadingRules,
)
from praxis_lite.checkpoints.steps.retention import BestCheckpoints as BestCheckpoints
from praxis_lite.checkpoints.steps.save_settings import SaveSettings as SaveSettings
from praxis_lite.core.errors import ConfigError as ConfigError
from praxis_lite.core.errors import Error as Error
from praxis_lite.core.errors import FailedSave as FailedSave
from praxis_lite.core.errors import NotCertified as NotCertified
from praxis_lite.core.errors import OutOfMemory as OutOfMemory
from praxis_lite.core.errors import PeerLost as PeerLost
from praxis_lite.core.errors import StepLost as StepLost
from praxis_lite.core.sharding.mesh_config import MeshConfig as MeshConfig
from praxis_lite.core.task import Task as Task
from praxis_lite.experiment.experiment import Experiment as Experiment
from praxis_lite.experiment.experiment import Job as Job
from praxis_lite.experiment.registry import register as register
from praxis_lite.experiment.run_config import RunConfig as RunConfig
from praxis_lite.experiment.run_settings import EarlyStopping as EarlyStopping
from praxis_lite.experiment.run_settings import EvaluationSettings as EvaluationSettings
from praxis_lite.experiment.run_settings import LossSpikeSettings as LossSpikeSettings
from praxis_lite.experiment.run_settings import ProfileSettings as ProfileSettings
from praxis_lite.experiment.run_settings import SampleSettings as SampleSettings
from praxis_lite.experiment.run_settings import StopSettings as StopSettings
from praxis_lite.host.optional_packages import require_package as require_package
from praxis_lite.trackers.mlflow import MLflow as MLflow
from praxis_lite.trackers.prometheus import PrometheusTextfile as PrometheusTextfile
from praxis_lite.trackers.tensorboard import TensorBoard as TensorBoard
from praxis_lite.trackers.tracker import TrackedRun as TrackedRun
from praxis_lite.trackers.tracker import Tracker as Tracker
from praxis_lite.trackers.weights_and_biases import WeightsAndBiases as WeightsAndBiases
from praxis_lite.trained_model.loading import load as load
from praxis_lite.trained_model.trained_model import TrainedModel as TrainedModel
from praxis_lite.trainer.hooks.hook import DispatchedStep as DispatchedStep
from praxis_lite.trainer.hooks.hook import Hook as Hook
from praxis_lite.trainer.hooks.hook import StepMetrics as StepMetrics
from praxis_tools.api import check as check
from praxis_tools.api import explain as explain
from praxis_tools.api import plan as plan
from praxis_tools.api import report as report

__version__: str
