"""Records and displays the metrics of a run: JSON lines, the progress line, the loss curve.

This package does not depend on models. It imports matplotlib on first use and never imports
tensorflow.
"""
