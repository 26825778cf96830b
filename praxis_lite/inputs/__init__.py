"""Input pipelines, sources of examples, and tokenized text.

`tf_data.TextWindows` and `numpy_data.TextWindows` take the same arguments and return the same
batches; `tf_data.TextWindows` prefetches them with tf.data.
"""

from praxis_lite.public_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__)
