"""AttentionSettings: a layer's choice of the kernel, and its options for the logits."""

import dataclasses

from praxis_lite.layers.attention.kernels.einsum import LogitOptions


@dataclasses.dataclass(frozen=True)
class AttentionSettings:
    """Specifies how a layer computes attention. Only `options` change the results.

    Attributes:
      kernel: A name in KERNELS, or "auto".
      chunk_size: Number of queries and keys per chunk of the chunked kernel, or of queries per
        block of the blocked kernel.
      context_parallel: A name in CONTEXT_PARALLEL, used if time is sharded, or None.
      options: Options for the logits.
    """

    kernel: str = "auto"
    chunk_size: int = 512
    context_parallel: str | None = None
    options: LogitOptions = LogitOptions()
