"""Base classes of layers; weights, their dims and splits; dense products."""
