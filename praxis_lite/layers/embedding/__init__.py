"""Embeddings of tokens and positions; softmaxes and their cross-entropy."""
