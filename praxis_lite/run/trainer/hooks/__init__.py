"""What is done while a job trains, beside the steps? A protocol, and the hooks of every job.

The loop (`trainer.py`) knows no hook by name, and a hook no other hook.
"""
