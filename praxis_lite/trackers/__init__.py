"""Trackers: TensorBoard, Weights & Biases, MLflow, Prometheus, or a user's service.

A tracker gets numbers, texts and pictures by step, and knows no device, model or loop.
"""
