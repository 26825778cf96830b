"""Prefetches windows of text with tf.data while the devices compute."""

import functools
import logging
from collections.abc import Iterator

import numpy as np

from praxis_lite.host.optional_packages import is_installed
from praxis_lite.inputs import numpy_data
from praxis_lite.inputs.tensorflow_import import tensorflow

__all__ = ["TextWindows"]

_PREFETCHED_BATCHES = 2


class TextWindows(numpy_data.TextWindows):
    """The batches from `numpy_data.TextWindows`, prefetched with tf.data.

    tensorflow is imported when the first batch is requested. If it is not installed (extra
    `tensorflow`), NumPy computes the same batches without prefetching.
    """

    def batches(
        self, start: int = 0, *, rows: slice | None = None
    ) -> Iterator[dict[str, np.ndarray]]:
        self.check()
        rows = self.rows_or_all(rows)
        if not is_installed("tensorflow"):
            _log_no_tensorflow()
            return super().batches(start, rows=rows)
        tf = tensorflow("tf_data.TextWindows")
        end = np.iinfo(np.int64).max if self.num_batches is None else self.num_batches
        with tf.device("/CPU:0"):
            stream = tf.constant(self.stream)
        shape = (rows.stop - rows.start, self.seq_len)

        def gather(index):
            positions, weights = tf.numpy_function(
                lambda index: self.window_rows(int(index), rows), [index], (tf.int64, tf.float32)
            )
            tokens = tf.gather(stream, positions)
            return {
                "ids": tf.ensure_shape(tokens[:, :-1], shape),
                "labels": tf.ensure_shape(tokens[:, 1:], shape),
                "weights": tf.ensure_shape(weights, shape),
            }

        options = tf.data.Options()
        options.threading.private_threadpool_size = 1
        options.threading.max_intra_op_parallelism = 1
        dataset = tf.data.Dataset.range(start, end).map(gather).prefetch(_PREFETCHED_BATCHES)
        return iter(dataset.with_options(options).as_numpy_iterator())


@functools.cache
def _log_no_tensorflow() -> None:
    """Logs once per process that NumPy replaces tensorflow."""
    logging.getLogger(__name__).info(
        "tf_data.TextWindows: tensorflow is not installed (extra tensorflow); NumPy computes the "
        "same batches without prefetching"
    )
