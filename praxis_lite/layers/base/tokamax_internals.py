"""Private names of tokamax (tokamax._src) without a usable public form in 0.0.12.

No other file uses them; tests/core/sharding/test_jax_canaries.py fails when they move. Of the
public functions, `tokamax.dot_product_attention` supports neither segments nor windows;
`tokamax.ragged_dot` has tiles of 128 for all but 30 shapes, and refuses dims below 128 and rows
that its tiles do not divide. Both need an attached TPU.

Imported when called: the import takes seconds, and tokamax is an extra.
"""

from types import ModuleType

from praxis_lite.host.optional_packages import optional_module


def splash_kernels() -> ModuleType:
    """Returns the module of splash attention's kernels; ConfigError if tokamax is missing."""
    return optional_module(
        "tokamax._src.ops.experimental.tpu.splash_attention.splash_attention_kernel",
        "atten_kernel='tokamax'",
    )


def splash_masks() -> ModuleType:
    """Returns the module of splash attention's masks; ConfigError if tokamax is missing."""
    return optional_module(
        "tokamax._src.ops.experimental.tpu.splash_attention.splash_attention_mask",
        "atten_kernel='tokamax'",
    )


def grouped_matmul_kernels() -> ModuleType:
    """Returns the module of `gmm` and `tgmm` for TPU; ConfigError if tokamax is missing."""
    return optional_module(
        "tokamax._src.ops.ragged_dot.pallas_mosaic_tpu_kernel", "expert_kernel='tokamax'"
    )
