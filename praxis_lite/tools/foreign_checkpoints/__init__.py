"""Checkpoints that other libraries wrote with Orbax: their arrays, without Orbax's JSON.

A job begins with those of Flax's users by `run.init_from_checkpoint_rules`; with those of Hugging
Face and Pax a command begins one.
"""
