"""The bases of layers: what their weights are, how their dims split, and what they are called."""
