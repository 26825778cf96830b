"""tensorflow for input pipelines: imported late, kept to the CPU, and asked for its determinism.

Never imported before a tf.data pipeline is used; its examples are read without it.
"""
