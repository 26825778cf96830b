"""The compiler's options of an experiment, of its sharding preset, and of a mode, as one."""

from praxis_lite.core.sharding.mesh_config import TPUS, CompilerOptions


def merged_options(first: CompilerOptions | None, more: CompilerOptions | None) -> CompilerOptions:
    """Returns `more` and, before it, `first`, whose "tpu" also counts before `more`'s kinds."""
    first, more = first or {}, more or {}
    merged = {}
    for name in more | first:
        of_all = first.get("tpu", {}) if name in TPUS.values() else {}
        others = {key: value for key, value in more.get(name, {}).items() if key not in of_all}
        merged[name] = others | dict(first.get(name, {}))
    return merged
