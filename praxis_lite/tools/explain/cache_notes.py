"""Which caches split over time, in place of heads."""

import jax
from flax import nnx
from jax.sharding import Mesh

from praxis_lite.core.sharding.split_dims import num_shards_of
from praxis_lite.core.task import Task
from praxis_lite.layers.attention.attentions import DotProductAttention
from praxis_lite.layers.attention.latent import MultiHeadLatentAttention


def cache_notes(task: Task, mesh: Mesh) -> list[str]:
    """Returns a line for each attention layer of a model whose cache splits over time on a mesh."""
    module = task.model.abstract_module()
    if not isinstance(module, nnx.Module):
        return []
    result = []
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        for path, layer in nnx.compat.iter_modules(module):
            if not isinstance(layer, DotProductAttention | MultiHeadLatentAttention):
                continue
            is_dot_product = isinstance(layer, DotProductAttention)
            if is_dot_product and not (layer.is_causal or layer.is_cross_attention):
                continue  # It has no cache.
            axes = layer.split_of_time()
            if axes is not None:
                result.append(
                    f"{'/'.join(map(str, path))}: the cache splits over time along {axes!r}, for "
                    f"it has no heads that divide over {num_shards_of(axes)} devices"
                )
    return result
