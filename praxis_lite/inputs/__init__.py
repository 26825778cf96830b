"""Input pipelines, sources of examples, and text.

`tf_data.TextWindows` and `numpy_data.TextWindows` have the same arguments and batches;
`tf_data.TextWindows` prefetches with tf.data.
"""

from praxis_lite.public_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__)
