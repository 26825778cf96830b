"""Input pipelines and the text they read.

`TextWindows` is there twice, with the same constructor and the same batches: `tf_data.TextWindows`
prefetches with tf.data, `numpy_data.TextWindows` runs without tensorflow.
"""

from praxis_lite.public_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__)
