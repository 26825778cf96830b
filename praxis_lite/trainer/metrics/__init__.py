"""What a run measures and where it is written: JSON lines, TensorBoard, the terminal, a PNG.

NumPy and the standard library at import; matplotlib and tensorboardX load on first use, tensorflow
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
