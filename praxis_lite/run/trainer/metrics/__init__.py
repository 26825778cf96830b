"""Where does a run write its numbers? JSON lines, TensorBoard, the terminal, a PNG.

Never sees a device or a model. matplotlib and tensorboardX are loaded on first use, tensorflow
never.
"""
