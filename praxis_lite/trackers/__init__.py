"""Where else is a run shown? TensorBoard, Weights & Biases, MLflow, Prometheus, a user's service.

Never sees a device, a model or the loop: a tracker gets numbers, texts and pictures by step.
"""
