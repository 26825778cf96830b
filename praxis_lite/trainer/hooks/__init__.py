"""What happens between the steps while a job trains? A protocol, and the hooks of every job.

The loop (`trainer.py`) knows no hook by name, and a hook no other hook.
"""
