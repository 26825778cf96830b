"""Private functions of tokamax (tokamax._src) without a usable public equivalent in tokamax 0.0.12.

No other file uses private names; tests/core/sharding/test_jax_canaries.py fails if these names
move. The public `tokamax.dot_product_attention` supports neither segments nor windows. The public
`tokamax.ragged_dot` uses tiles of 128 for all but 30 shapes, and rejects dims below 128 as well as
numbers of rows that are not a multiple of its tile size. Both require an attached TPU.

Modules are imported when these functions are called, because the import takes seconds and tokamax
is an optional dependency.
"""

from types import ModuleType

from praxis_lite.host.optional_packages import optional_module


def splash_kernels() -> ModuleType:
    """Returns the module with splash attention kernels; raises ConfigError without tokamax."""
    return optional_module(
        "tokamax._src.ops.experimental.tpu.splash_attention.splash_attention_kernel",
        "atten_kernel='tokamax'",
    )


def splash_masks() -> ModuleType:
    """Returns the module with splash attention masks; raises ConfigError without tokamax."""
    return optional_module(
        "tokamax._src.ops.experimental.tpu.splash_attention.splash_attention_mask",
        "atten_kernel='tokamax'",
    )


def grouped_matmul_kernels() -> ModuleType:
    """Returns the module with `gmm` and `tgmm` for TPU; raises ConfigError without tokamax."""
    return optional_module(
        "tokamax._src.ops.ragged_dot.pallas_mosaic_tpu_kernel", "expert_kernel='tokamax'"
    )
