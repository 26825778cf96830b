"""JAX's persistent compilation cache: it is on by default, in the user's cache folder."""

import jax

from praxis_lite.host.whole_files import user_cache


def use_compilation_cache() -> None:
    """Lets JAX store compiled programs, so that the next launch of a job starts at once.

    A directory that the user gave (JAX_COMPILATION_CACHE_DIR) is kept.
    """
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(user_cache() / "xla"))
