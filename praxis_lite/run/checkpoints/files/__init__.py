"""What lies in a checkpoint's folder, read without trust: no byte is believed before it is checked.

Never sees a model, a mesh or a job's config.
"""
