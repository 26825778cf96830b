"""Base classes of layers: weights, the dims of weights and their splits, dense products."""
