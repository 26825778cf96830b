"""What can a trained model do in Python: evaluate, predict, generate, show itself in a notebook?

Knows jobs and their checkpoints; trains nothing.
"""
