"""Embeddings of ids and positions; softmaxes and their cross-entropy.
"""
