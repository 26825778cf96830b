"""The compiler's options of an experiment, of its sharding preset, and of a mode, as one."""

from praxis_lite.core.sharding.mesh_config import TPUS, CompilerOptions


def merged_options(first: CompilerOptions | None, more: CompilerOptions | None) -> CompilerOptions:
    """Returns `more` and, before it, `first`, whose "tpu" also counts before `more`'s kinds.

    A name that ends in "?", which XLA may lack, is the same option as that without.
    """
    first, more = first or {}, more or {}
    merged = {}
    for name in more | first:
        own = dict(first.get(name, {}))
        of_all = first.get("tpu", {}) if name in TPUS.values() else {}
        before = {key.removesuffix("?") for key in (*own, *of_all)}
        others = {
            key: value for key, value in more.get(name, {}).items()
            if key.removesuffix("?") not in before
        }
        merged[name] = others | own
    return merged
