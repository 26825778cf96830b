"""--mode=explain says which caches split over time."""

import fiddle as fdl
import optax

from praxis_lite.core import Learner, MeshConfig, make_mesh
from praxis_lite.layers import (
    DotProductAttention,
    MultiHeadLatentAttention,
    Transformer,
    TransformerLm,
    set_sharding_params,
)
from praxis_lite.tasks.language_model import LanguageModelTask
from praxis_tools.explain.explain import cache_notes

LATENT = {"kv_lora_rank": 5, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4}


def test_a_note_for_each_layer_with_fewer_heads_than_devices():
    attentions = [
        fdl.Partial(DotProductAttention, num_kv_heads=2),
        fdl.Partial(DotProductAttention, num_kv_heads=1),
        fdl.Partial(MultiHeadLatentAttention, **LATENT),
    ]
    lm = fdl.Partial(
        TransformerLm,
        17,
        12,
        20,
        num_heads=6,
        num_layers=3,
        dim_per_head=4,
        transformer_layer_tpl=[fdl.Partial(Transformer, tr_atten_tpl=x) for x in attentions],
    )
    task = LanguageModelTask(fdl.build(set_sharding_params(lm, "megatron")), Learner(optax.sgd, 1))

    def layers_of(shape):
        notes = cache_notes(task, make_mesh(MeshConfig(ici_mesh_shape=shape)))
        assert all("along 'mdl'" in note and f"{shape[2]} devices" in note for note in notes)
        return [note.split(":")[0].split("x_layers_")[1] for note in notes]

    assert layers_of((1, 1, 2)) == ["1/self_attention", "2/self_attention"]
    assert layers_of((1, 2, 3)) == [f"{i}/self_attention" for i in range(3)]
    assert layers_of((1, 4, 1)) == []
