"""Experiment trackers: TensorBoard, Weights & Biases, MLflow, Prometheus, or a custom service.

A tracker receives numbers, text and images for each step, and does not access devices, models or
the training loop.
"""
