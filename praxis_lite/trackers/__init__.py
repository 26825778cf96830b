"""Experiment trackers: TensorBoard, Weights & Biases, MLflow, Prometheus, or a custom service.

A tracker gets numbers, texts and images by step; it never deals with devices, models or the loop.
"""
