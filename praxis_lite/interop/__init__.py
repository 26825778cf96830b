"""Weights of other systems as this library's, and back."""
