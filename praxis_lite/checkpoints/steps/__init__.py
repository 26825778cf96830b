"""The folders of checkpoints by step: naming, verification, commits, retention and deletion.

Never deals with the arrays inside.
"""
