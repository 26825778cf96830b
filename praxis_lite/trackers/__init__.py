"""Experiment trackers: TensorBoard, Weights & Biases, MLflow, Prometheus, or a custom service.

A tracker receives numbers, texts and images by step, and never accesses devices, models or the
training loop.
"""
