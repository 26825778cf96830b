"""Base classes for layers: weights, their dims and sharding, and dense matmuls."""
