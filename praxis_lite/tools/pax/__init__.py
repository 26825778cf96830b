"""Weights, checkpoints and jobs of Pax as ours, and weights back."""
