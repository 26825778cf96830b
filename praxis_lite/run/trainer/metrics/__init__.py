"""Where do the numbers of a run go, and its clocks? JSON lines, TensorBoard, the terminal, a PNG.

Never sees a model. matplotlib and tensorboardX are loaded on first use, tensorflow
never.
"""
