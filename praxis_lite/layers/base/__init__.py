"""Base classes for layers: weights, their dims and splits, and dense matmuls."""
