"""Records and displays the metrics of a run: JSON lines, the progress line, the loss curve.

Never sees a model. matplotlib is imported on first use, tensorflow never.
"""
