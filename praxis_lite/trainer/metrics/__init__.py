"""Where does a run write its numbers? JSON lines, TensorBoard, the terminal, a PNG.

Never sees a device or a model. matplotlib and tensorboardX are loaded on first use, tensorflow
never.
"""

from praxis_lite.trainer.metrics.json_lines import JsonLinesWriter, read_json_lines
from praxis_lite.trainer.metrics.loss_curve import plot_loss_curve
from praxis_lite.trainer.metrics.progress import ProgressLine
from praxis_lite.trainer.metrics.tensorboard import TensorBoardWriter
from praxis_lite.trainer.metrics.weighted import WeightedMean, WeightedScalars

__all__ = [
    "JsonLinesWriter",
    "ProgressLine",
    "TensorBoardWriter",
    "WeightedMean",
    "WeightedScalars",
    "plot_loss_curve",
    "read_json_lines",
]
